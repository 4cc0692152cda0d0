// Vectors of W floats by the compiler's vector extensions, and tiles of a matrix product in registers.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
constexpr int W = 16;
constexpr int ACCUMULATORS = 24;  // of 32 registers
#else
#if defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;  // SSE and NEON
#endif
constexpr int ACCUMULATORS = 12;  // of 16 registers
#endif

// A tile of a product: ROWS broadcasts beside PANEL vectors.
constexpr int PANEL = 4;
constexpr int ROWS = ACCUMULATORS / PANEL;

typedef float V __attribute__((vector_size(W * 4)));
typedef float Unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));

// Minus zero, not plus: x + 0 is not x for x = -0, so the compiler would have to add.
static inline V all(float x) { return x - V{}; }

// The first n floats, of any n: a partial vector through a mask costs what a whole one does, a memcpy of a length that is
// only known at run time a call.
static inline V load(const float* p, int64_t n) {
    if (n >= W) return *(const Unaligned*)p;
#if defined(__AVX512F__)
    return (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    V v{};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
#endif
}

static inline void store(float* p, V v, int64_t n) {
    if (n >= W)
        *(Unaligned*)p = v;
    else
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
        std::memcpy(p, &v, n * sizeof(float));
#endif
}

// Cuts rows into tiles of at most ROWS; each(first row, height).
template <typename F>
static void by_tiles(int64_t rows, F&& each) {
    // Tiles of nearly equal height: 16 rows are 6 + 5 + 5, not 6 + 6 + 4.
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t k = 0, row = 0; k < tiles; ++k) {
        const int64_t height = rows / tiles + (k < rows % tiles);
        each(row, height);
        row += height;
    }
}

// sums[m][n] += a[m, :] packed[:, n] for M rows of ``depth`` floats and a packed panel of N vectors. Not inlined: next to
// other code the compiler runs out of registers and moves the sums to and fro within the loop.
template <int M, int N>
[[gnu::noinline]] static void multiply(const float* a, int64_t pitch, int64_t depth, const float* packed, V* sums) {
    V acc[M][N];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = sums[m * N + n];
    for (int64_t k = 0; k < depth; ++k, packed += N * W) {
        // All rows' numbers and one vector of the panel at a time: with a whole panel of them clang runs out of registers.
        V x[M];
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) x[m] = all(a[m * pitch + k]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const V weights = *(const Unaligned*)(packed + n * W);
#pragma GCC unroll 6
            for (int m = 0; m < M; ++m) acc[m][n] += x[m] * weights;
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m * N + n] = acc[m][n];
}

// Zeros of a kernel's own. Not std::vector: nothing of the C++ library is linked, so that a wheel carries none of it.
template <typename T>
class Zeros {
  public:
    explicit Zeros(int64_t count) : first((T*)std::calloc(std::max<int64_t>(count, 1), sizeof(T))) {
        if (!first) std::abort();
    }
    ~Zeros() { std::free(first); }
    Zeros(const Zeros&) = delete;
    Zeros& operator=(const Zeros&) = delete;
    T* data() { return first; }
    T& operator[](int64_t i) { return first[i]; }
    void swap(Zeros& other) { std::swap(first, other.first); }

  private:
    T* first;
};

// How many items of so many FLOPs are worth a thread: some 0.1 ms of work, for a thread of one's own costs 20 us and more.
static int64_t worth_a_thread(double flops) { return int64_t(1e7 / std::max(flops, 1.0)) + 1; }

// Runs a function on a team of threads and returns when all have ended: GOMP_parallel of OpenMP's runtime.
typedef void (*Team)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// That of the runtime in which torch computes (dpcore_use_team); none: threads that live for one call. torch's threads
// spin for some milliseconds after each of its operators and would take the processors from threads beside them.
extern __attribute__((visibility("hidden"))) Team dpcore_team;

// The items of by_threads in shares that do not depend on who takes them.
template <typename F>
struct Shares {
    F* each;
    int64_t count, shares;
    std::atomic<int64_t> next;
    static void* run(void* all) {
        Shares* s = (Shares*)all;
        for (int64_t k; (k = s->next.fetch_add(1, std::memory_order_relaxed)) < s->shares;)
            (*s->each)(k * s->count / s->shares, (k + 1) * s->count / s->shares);
        return nullptr;
    }
    static void work(void* all) { run(all); }
};

// Splits ``count`` items that share nothing over threads, no thread below ``least`` items; each(first, last). Where there
// is no team, the threads live for this call only: no pool that a fork would lose.
template <typename F>
static void by_threads(int64_t count, int64_t least, int64_t threads, F&& each) {
    threads = std::max<int64_t>(1, std::min(threads, (count + least - 1) / least));
    using Own = Shares<std::remove_reference_t<F>>;
    Own shares{&each, count, threads, {0}};
    if (threads > 1 && dpcore_team) return dpcore_team(Own::work, &shares, unsigned(threads), 0);
    Zeros<pthread_t> others(threads - 1);
    int64_t started = 0;
    // Where the system gives no more threads, those that there are take all shares.
    while (started < threads - 1 && pthread_create(&others[started], nullptr, Own::run, &shares) == 0) ++started;
    Own::run(&shares);
    for (int64_t k = 0; k < started; ++k) pthread_join(others[k], nullptr);
}
