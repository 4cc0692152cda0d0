// Vectors of W floats by the compiler's vector extensions, and tiles of a matrix product in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int W = 16;
constexpr int ACCUMULATORS = 24;  // of 32 registers
#else
constexpr int W = 8;
constexpr int ACCUMULATORS = 12;  // of 16 registers
#endif

typedef float V __attribute__((vector_size(W * 4)));
typedef float Unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(W * 4)));

// Minus zero, not plus: x + 0 is not x for x = -0, so the compiler would have to add.
static inline V all(float x) { return x - V{}; }

static inline V load(const float* p, int64_t n) {
    if (n >= W) return *(const Unaligned*)p;
    V v{};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}

static inline void store(float* p, V v, int64_t n) {
    if (n >= W)
        *(Unaligned*)p = v;
    else
        std::memcpy(p, &v, n * sizeof(float));
}

// Splits ``count`` items that share nothing over threads, no thread below ``least`` items; each(first, last).
template <typename F>
static void by_threads(int64_t count, int64_t least, int64_t threads, F&& each) {
    threads = std::max<int64_t>(1, std::min(threads, (count + least - 1) / least));
    std::vector<std::thread> others;
    for (int64_t k = 1; k < threads; ++k)
        others.emplace_back([&each, k, count, threads] { each(k * count / threads, (k + 1) * count / threads); });
    each(0, count / threads);
    for (auto& other : others) other.join();
}
