// Normal noise, added in one pass: the values that torch draws from a Mersenne twister in this state, to rounding.
//
// torch fills a float tensor with uniforms of 24 bits, a word of the twister each, and turns every 16 of them into normals
// by Box-Muller: the first 8 give radii, the last 8 angles, cosines replace the former and sines the latter. What is left
// over when the length is no multiple of 16 comes with the last 15 values before it from 16 fresh words.
// Here the twister's block of 624 words (39 groups) is made, tempered and transformed along vectors.

#include "vectors.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

constexpr int WORDS = 624, SHIFT = 397, GROUP = 16, HALF = 8, GROUPS = WORDS / GROUP;

static inline uint32_t mixed(uint32_t a, uint32_t b) {
    return (((a & 0x80000000u) | (b & 0x7fffffffu)) >> 1) ^ (-(b & 1u) & 0x9908b0dfu);
}

static void next_block(uint32_t* __restrict state) {
    // Three loops without a dependence shorter than a vector within each.
    for (int k = 0; k < WORDS - SHIFT; ++k) state[k] = state[k + SHIFT] ^ mixed(state[k], state[k + 1]);
#pragma GCC ivdep
    for (int k = WORDS - SHIFT; k < WORDS - 1; ++k) state[k] = state[k + SHIFT - WORDS] ^ mixed(state[k], state[k + 1]);
    state[WORDS - 1] = state[SHIFT - 1] ^ mixed(state[WORDS - 1], state[0]);
}

static inline float uniform(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    y ^= y >> 18;
    return float(int32_t(y & 0xffffffu)) * (1.0f / 16777216);
}

static inline V select(I mask, V yes, V no) { return (V)(((I)yes & mask) | ((I)no & ~mask)); }

// Natural logarithm of 0 < x <= 1: x = 2^k m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s), s = (m - 1) / (m + 1).
static inline V logarithm(V x) {
    // Unsigned, for lanes beside the values hold anything, and signed numbers must not overflow.
    const I k = (I)((U)x - 0x3f3504f3u) >> 23;
    const V m = (V)((U)x - ((U)k << 23)), s = (m - 1.0f) / (m + 1.0f), q = s * s;
    V p = q * (2.0f / 11) + (2.0f / 9);
    p = p * q + (2.0f / 7);
    p = p * q + (2.0f / 5);
    p = p * q + (2.0f / 3);
    const V n = __builtin_convertvector(k, V);
    // ln 2 in two parts: the first has few bits, so that its product with n is exact.
    return n * 0.693359375f + (n * -2.12194440e-4f + (s * q * p + 2.0f * s));
}

// A loop over sqrtf would not become vectors: it may have to set errno.
static inline V root(V x) {
#if defined(__AVX512F__)
    return (V)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (V)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

struct Buffer {
    alignas(64) float uniforms[WORDS], radii[WORDS], angles[WORDS];
};

// radii[8 g + j] and angles[8 g + j] of ``groups`` groups: uniforms in, normals out.
static void transform(Buffer& buffer, int64_t groups) {
    for (int64_t i = 0; i < groups * HALF; i += W) {
        V* first = (V*)(buffer.radii + i);
        V* second = (V*)(buffer.angles + i);
        const V radius = root(-2.0f * logarithm(1.0f - *first));
        // The angle in quarter turns: the nearest whole number of them, and a rest r of at most an eighth turn.
        const V quarters = *second * 4.0f, shift = all(12582912.0f), moved = quarters + shift;
        const I turn = (I)((U)moved - (U)shift);
        const V r = (quarters - (moved - shift)) * 1.57079632679489662f, q = r * r;
        V sine = q * (1.0f / 362880) - (1.0f / 5040);
        sine = sine * q + (1.0f / 120);
        sine = sine * q - (1.0f / 6);
        sine = sine * q * r + r;
        V cosine = q * (-1.0f / 3628800) + (1.0f / 40320);
        cosine = cosine * q - (1.0f / 720);
        cosine = cosine * q + (1.0f / 24);
        cosine = cosine * q * q - 0.5f * q + 1.0f;
        const I odd = -(turn & 1);
        const U sign_cosine = (((U)turn + 1u) & 2u) << 30, sign_sine = ((U)turn & 2u) << 30;
        *first = radius * (V)((U)select(odd, sine, cosine) ^ sign_cosine);
        *second = radius * (V)((U)select(odd, cosine, sine) ^ sign_sine);
    }
}

static void draw(const uint32_t* words, int64_t groups, Buffer& buffer) {
    for (int64_t i = 0; i < groups * GROUP; ++i) buffer.uniforms[i] = uniform(words[i]);
    for (int64_t g = 0; g < groups; ++g) {
        std::memcpy(buffer.radii + g * HALF, buffer.uniforms + g * GROUP, HALF * sizeof(float));
        std::memcpy(buffer.angles + g * HALF, buffer.uniforms + g * GROUP + HALF, HALF * sizeof(float));
    }
    transform(buffer, groups);
}

// out[j] += std * normal j of group g, or = (``ADDS`` false), for the first ``stop`` of 16.
template <bool ADDS>
static inline void put_group(const Buffer& buffer, int64_t g, float std, float* out, int64_t stop) {
    auto put = [](float& to, float value) { to = ADDS ? to + value : value; };
    const float *first = buffer.radii + g * HALF, *second = buffer.angles + g * HALF;
    if (stop >= GROUP) {
        for (int j = 0; j < HALF; ++j) put(out[j], std * first[j]);
        for (int j = 0; j < HALF; ++j) put(out[HALF + j], std * second[j]);
    } else {
        for (int64_t j = 0; j < stop; ++j) put(out[j], std * (j < HALF ? first[j] : second[j - HALF]));
    }
}

template <bool ADDS>
static void put_normals(uint32_t* state, float* target, int64_t count, double deviation) {
    Buffer buffer{};
    const float std = float(deviation);
    const int64_t whole = count / GROUP, left = count % GROUP, kept = left ? count - GROUP : count;
    int64_t used = WORDS;
    for (int64_t first = 0; first < whole; first += GROUPS) {
        const int64_t groups = std::min<int64_t>(GROUPS, whole - first);
        next_block(state);
        used = groups * GROUP;
        draw(state, groups, buffer);
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t at = (first + g) * GROUP;
            put_group<ADDS>(buffer, g, std, target + at, kept - at);
        }
    }
    if (!left) return;
    // Words were drawn for all values before the 16 fresh ones.
    uint32_t words[GROUP];
    for (int64_t i = -left; i < GROUP; ++i) {
        if (used == WORDS) {
            next_block(state);
            used = 0;
        }
        if (i >= 0) words[i] = state[used];
        ++used;
    }
    draw(words, 1, buffer);
    put_group<ADDS>(buffer, 0, std, target + count - GROUP, GROUP);
}

// target[i] += std * normal i for i < count, count >= 16; ``state``: the twister's 624 words before its first block.
extern "C" void dpcore_add_normals(uint32_t* state, float* target, int64_t count, double deviation) {
    put_normals<true>(state, target, count, deviation);
}

// The same into a target of any values, which are written over.
extern "C" void dpcore_fill_normals(uint32_t* state, float* target, int64_t count, double deviation) {
    put_normals<false>(state, target, count, deviation);
}
