// Normal noise, added or written in one pass: the numbers of dpcore/normals.py, in float32.
//
// A stream is Philox 4x32-10 under a name of four words, the key and the counter's upper half. Counter n gives two pairs of
// normals. Of 256 counters the first normals stand beside each other, then the second ones, and so on. Every operation is
// rounded by itself and to nearest, so that all instruction sets give the same bits.

#include "vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

constexpr int GROUPS = 256, BLOCK = 4 * GROUPS, ROUNDS = 10;
constexpr uint32_t FIRST = 0xD2511F53u, SECOND = 0xCD9E8D57u, WEYL[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int64_t BLOCKS_A_THREAD = 64;  // some 0.1 ms

// Each operation waits for the one before, and a processor looks only so far ahead: so many vectors take each of them in
// turn.
constexpr int TOGETHER = 4, LANES = TOGETHER * W;
#define EACH _Pragma("GCC unroll 4") for (int n = 0; n < TOGETHER; ++n)

// 32-bit words, each in the lower half of 64 bits; the upper half holds anything.
typedef uint64_t L __attribute__((vector_size(W * 4)));
typedef U Words __attribute__((may_alias));
typedef V Normals __attribute__((may_alias));
typedef float Number __attribute__((may_alias));

// The whole products of the lower halves.
static inline L multiplied(L words, uint32_t by) {
#if defined(__AVX512F__)
    return (L)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi32(int(by)));
#elif defined(__AVX2__)
    return (L)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi32(int(by)));
#elif defined(__SSE2__) && !defined(__AVX__)
    return (L)_mm_mul_epu32((__m128i)words, _mm_set1_epi32(int(by)));
#elif defined(__ARM_NEON)
    return (L)vmull_u32(vmovn_u64((uint64x2_t)words), vdup_n_u32(by));
#else
    return (words & 0xffffffffu) * by;
#endif
}

// The lower halves of ``even`` and ``odd``, by turns.
static inline U joined(L even, L odd) {
#if defined(__AVX512F__)
    return (U)_mm512_mask_mov_epi32((__m512i)even, 0xaaaa, (__m512i)(odd << 32));
#elif defined(__AVX2__)
    return (U)_mm256_blend_epi32((__m256i)even, (__m256i)(odd << 32), 0xaa);
#else
    return (U)((even & 0xffffffffu) | (odd << 32));
#endif
}

// ``yes`` where the sign bit of ``of`` is set, elsewhere ``no``.
static inline V by_sign(U of, V yes, V no) {
#if defined(__AVX512F__)
    return (V)_mm512_mask_blend_ps(_mm512_cmplt_epi32_mask((__m512i)of, _mm512_setzero_si512()), (__m512)no, (__m512)yes);
#elif defined(__AVX__)
    return (V)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)of);
#elif defined(__SSE4_1__)
    return (V)_mm_blendv_ps((__m128)no, (__m128)yes, (__m128)of);
#else
    const I mask = (I)of >> 31;
    return (V)(((I)yes & mask) | ((I)no & ~mask));
#endif
}

// A loop over sqrtf would not become vectors: it may have to set errno.
static inline V root(V x) {
#if defined(__AVX512F__)
    return (V)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (V)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (V)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// A stream's key of each round and the upper half of its counters, and the numbers of the even lanes.
struct Stream {
    L key[ROUNDS][2], upper[2], even;
    explicit Stream(const uint32_t* name) {
        for (int j = 0; j < 2; ++j) upper[j] = L{} + uint64_t(name[2 + j]);
        for (int r = 0; r < ROUNDS; ++r)
            for (int j = 0; j < 2; ++j) key[r][j] = L{} + uint64_t(name[j] + uint32_t(r) * WEYL[j]);
        for (int i = 0; i < W / 2; ++i) even[i] = uint64_t(2 * i);
    }
};

// words[k * GROUPS + i]: word k of counter + i, for LANES counters that begin at a multiple of LANES.
static inline void put_words(const Stream& stream, uint64_t counter, uint32_t* words) {
    for (int64_t first = 0; first < LANES; first += LANES / 2) {
        L c[TOGETHER][4];
        EACH {
            // Even and odd counters lie apart, which leaves room for the products.
            c[n][0] = stream.even + (counter + uint64_t(first + n / 2 * W + n % 2));
            c[n][1] = L{} + (counter >> 32);
            c[n][2] = stream.upper[0];
            c[n][3] = stream.upper[1];
        }
#pragma GCC unroll 10
        for (int r = 0; r < ROUNDS; ++r) EACH {
                const L of_first = multiplied(c[n][0], FIRST), of_third = multiplied(c[n][2], SECOND);
                c[n][0] = (of_third >> 32) ^ (c[n][1] ^ stream.key[r][0]);
                c[n][2] = (of_first >> 32) ^ (c[n][3] ^ stream.key[r][1]);
                c[n][1] = of_third;
                c[n][3] = of_first;
            }
        for (int n = 0; n < TOGETHER; n += 2)
            for (int k = 0; k < 4; ++k) *(Words*)(words + k * GROUPS + first + n / 2 * W) = joined(c[n][k], c[n + 1][k]);
    }
}

// radii[n]: Box-Muller's radius sqrt(-2 log u) of u = (words[n] + 1/2) / 2^32.
static inline void put_radii(const Words* words, Normals* radii) {
    constexpr float ONE = 4294967296.0f;  // all is times 2^32 until it is divided
    U over[TOGETHER];
    V more[TOGETHER], s[TOGETHER], q[TOGETHER], p[TOGETHER], k[TOGETHER];
    EACH {
        // The smaller one of u and 1 - u.
        const V y = __builtin_convertvector((I)words[n] ^ ((I)words[n] >> 31), V) + 0.5f;
        const U u = (U)by_sign(words[n], ONE - y, y);
        // u = 2^k m with m in [sqrt(1/2), sqrt(2)).
        over[n] = u - 0x4f3504f3u;
        // Where k is 0, u has few digits of 1 - u.
        more[n] = by_sign(over[n], (V)(u - (over[n] & 0xff800000u)) - ONE, -y);
    }
    // log m = 2 atanh(s), s = (m - 1) / (m + 1), by the polynomial of least largest error; all times -2.
    EACH s[n] = more[n] / (more[n] + 2.0f * ONE);
    EACH q[n] = s[n] * s[n];
    EACH p[n] = q[n] * -0.59743458f - 0.79955083f;
    EACH p[n] = p[n] * q[n] - 1.3333355f;
    EACH p[n] = p[n] * q[n] - 4.0f;
    EACH k[n] = __builtin_convertvector((I)over[n] >> 23, V);
    // ln 2 in two parts: the first has few bits, so that its product with k is exact.
    EACH p[n] = k[n] * -1.38671875f + (k[n] * 4.24388880e-4f + s[n] * p[n]);
    EACH radii[n] = root(p[n]);
}

// first[n] and second[n]: cosine and sine of 2 pi (words[n] + 1/2) / 2^32, times radii[n].
static inline void turn(const Words* words, const Normals* radii, Normals* first, Normals* second) {
    U moved[TOGETHER];
    V r[TOGETHER], t[TOGETHER], sine[TOGETHER], cosine[TOGETHER];
    EACH {
        // The nearest number of quarter turns, in the two upper bits, and a rest r of at most an eighth turn.
        moved[n] = words[n] + 0x20000000u;
        const U rest = words[n] - (moved[n] & 0xc0000000u);
        r[n] = (__builtin_convertvector((I)rest, V) + 0.5f) * 1.4629180792671596e-09f;
    }
    EACH t[n] = r[n] * r[n];
    EACH sine[n] = t[n] * -1.9517299e-4f + 8.3321780e-3f;
    EACH cosine[n] = t[n] * 2.4438452e-5f - 1.3887368e-3f;
    EACH sine[n] = sine[n] * t[n] - 0.16666655f;
    EACH cosine[n] = cosine[n] * t[n] + 4.1666646e-2f;
    EACH sine[n] = sine[n] * (t[n] * r[n]) + r[n];
    EACH cosine[n] = cosine[n] * (t[n] * t[n]) + (1.0f - 0.5f * t[n]);
    EACH {
        // In odd quarters they change places.
        const U odd = moved[n] << 1;
        const V x = by_sign(odd, sine[n], cosine[n]), y = by_sign(odd, cosine[n], sine[n]), radius = radii[n];
        first[n] = radius * (V)((U)x ^ ((moved[n] + 0x40000000u) & 0x80000000u));
        second[n] = radius * (V)((U)y ^ (moved[n] & 0x80000000u));
    }
}

// Words, in whose places normals are written.
struct Block {
    alignas(64) uint32_t words[BLOCK];
};

// The normals of a block, in the lanes [first, last) of 256 and the halves [half, end).
static inline void draw(
    const Stream& stream, int64_t block, int64_t first, int64_t last, int64_t half, int64_t end, Block& to) {
    for (int64_t lane = first; lane < last; lane += LANES)
        put_words(stream, uint64_t(block * GROUPS + lane), to.words + lane);
    // Both halves hold words of radii and, behind them, those of angles; normals take their places.
    for (; half < end; half += BLOCK / 2)
        for (int64_t lane = half + first; lane < half + last; lane += LANES) {
            const Words* words = (const Words*)(to.words + lane);
            Normals* normals = (Normals*)(to.words + lane);
            put_radii(words, normals);
            turn(words + GROUPS / W, normals, normals, normals + GROUPS / W);
        }
}

// Those at the places [from, end), and perhaps others.
static void draw_part(const Stream& stream, int64_t block, int64_t from, int64_t end, Block& to) {
    const bool is_short = from / GROUPS == (end - 1) / GROUPS;
    const int64_t first = is_short ? from % GROUPS / LANES * LANES : 0, last = is_short ? (end - 1) % GROUPS + 1 : GROUPS;
    draw(stream, block, first, last, from / (BLOCK / 2) * (BLOCK / 2), end, to);
}

static void draw_whole(const Stream& stream, int64_t block, Block& to) { draw(stream, block, 0, GROUPS, 0, BLOCK, to); }

// target[i] is place ``start`` + i of the stream.
template <bool ADDS>
static void put(const uint32_t* name, float* target, int64_t start, int64_t count, int64_t threads, double deviation) {
    if (count <= 0) return;
    const Stream stream(name);
    const float std = float(deviation);
    const int64_t first = start / BLOCK, stop = start + count;
    by_threads((stop - 1) / BLOCK + 1 - first, BLOCKS_A_THREAD, threads, [&](int64_t from, int64_t to) {
        Block drawn;
        for (int64_t block = first + from; block < first + to; ++block) {
            const int64_t place = std::max(start, block * BLOCK), end = std::min(stop, (block + 1) * BLOCK);
            if (end - place == BLOCK)
                draw_whole(stream, block, drawn);
            else
                draw_part(stream, block, place % BLOCK, end - block * BLOCK, drawn);
            const Number* normals = (const Number*)drawn.words + place % BLOCK;
            float* out = target + (place - start);
#pragma GCC ivdep
            for (int64_t i = 0; i < end - place; ++i) out[i] = ADDS ? out[i] + std * normals[i] : std * normals[i];
        }
    });
}

// target[i] += deviation * number start + i of the stream ``name`` (four words), for i < count.
extern "C" void dpcore_add_normals(
    const uint32_t* name, float* target, int64_t start, int64_t count, int64_t threads, double deviation) {
    put<true>(name, target, start, count, threads, deviation);
}

// The same into a target of any values, which are written over.
extern "C" void dpcore_fill_normals(
    const uint32_t* name, float* target, int64_t start, int64_t count, int64_t threads, double deviation) {
    put<false>(name, target, start, count, threads, deviation);
}

// rows[k, i] is m(steps - kept + k), of m(s) = z(s) + factors[0] p(s - 1) + ... + factors[back - 1] p(s - back), where z(s)
// is number start + i of the stream names[s] (four words), and p is z, or m where noise feeds back. Before the first step
// p is zero, or what the last rows hold where it goes on behind them.
extern "C" void dpcore_fill_mixed(
    const uint32_t* names,
    const float* factors,
    float* rows,
    int64_t steps,
    int64_t back,
    int64_t kept,
    int64_t count,
    int64_t start,
    int64_t feeds_back,
    int64_t goes_on,
    int64_t threads) {
    if (count <= 0) return;
    const int64_t first = start / BLOCK, stop = start + count;
    by_threads((stop - 1) / BLOCK + 1 - first, BLOCKS_A_THREAD / 8, threads, [&](int64_t from, int64_t to) {
        const int64_t places = back + 1;
        Zeros<Block> memory(places + 2);
        Block* past = (Block*)((uintptr_t(memory.data()) + 63) / 64 * 64);  // step s has the place s % places
        Block& mixed = past[places];
        for (int64_t block = first + from; block < first + to; ++block) {
            const int64_t place = std::max(start, block * BLOCK), end = std::min(stop, (block + 1) * BLOCK);
            const int64_t in = place % BLOCK, low = in / LANES * LANES, high = end - block * BLOCK;
            const bool is_whole = end - place == BLOCK;
            float* out = rows + (place - start);
            std::memset(past, 0, size_t(places) * sizeof(Block));
            for (int64_t j = 1; goes_on && j <= back; ++j)
                std::memcpy(past[places - j].words + in, out + (kept - j) * count, size_t(end - place) * sizeof(float));
            for (int64_t s = 0; s < steps; ++s) {
                Block& now = past[s % places];
                if (is_whole)
                    draw_whole(Stream(names + 4 * s), block, now);
                else
                    draw_part(Stream(names + 4 * s), block, in, high, now);
                const bool is_kept = s >= steps - kept;
                if (!is_kept && !feeds_back) continue;
                float* row = out + (s - steps + kept) * count;
                for (int64_t lane = low; lane < high; lane += LANES) {
                    Normals* z = (Normals*)(now.words + lane);
                    V sum[TOGETHER];
                    EACH sum[n] = z[n];
                    for (int64_t j = 0, at = s % places; j < back; ++j) {
                        at = at ? at - 1 : back;
                        const Normals* before = (const Normals*)(past[at].words + lane);
                        EACH sum[n] += factors[j] * before[n];
                    }
                    if (feeds_back) EACH z[n] = sum[n];
                    if (is_kept && is_whole)
                        EACH ((Unaligned*)(row + lane))[n] = sum[n];
                    else
                        EACH ((Normals*)(mixed.words + lane))[n] = sum[n];
                }
                if (is_kept && !is_whole) std::memcpy(row, mixed.words + in, size_t(end - place) * sizeof(float));
            }
        }
    });
}

// target[i, j] += deviations[i] * number start + rows[i] * width + j, for ``count`` different rows in ascending order.
extern "C" void dpcore_add_normals_to_rows(
    const uint32_t* name,
    float* target,
    const int64_t* rows,
    const float* deviations,
    int64_t count,
    int64_t width,
    int64_t start,
    int64_t threads) {
    if (count <= 0) return;
    const Stream stream(name);
    const int64_t near = BLOCK / width + 1;
    by_threads(count, BLOCKS_A_THREAD * 4, threads, [&](int64_t from, int64_t to) {
        Block drawn;
        int64_t whole = -1;  // the block that is drawn as a whole
        for (int64_t i = from; i < to; ++i) {
            float* out = target + i * width;
            const float std = deviations[i];
            for (int64_t place = start + rows[i] * width, stop = place + width; place < stop;) {
                const int64_t block = place / BLOCK, end = std::min(stop, (block + 1) * BLOCK);
                if (block != whole) {
                    // As a whole where most of the rows beside this one come, too.
                    const bool all = i + near < to && rows[i + near] - rows[i] <= 2 * near;
                    if (all)
                        draw_whole(stream, block, drawn);
                    else
                        draw_part(stream, block, place % BLOCK, end - block * BLOCK, drawn);
                    whole = all ? block : -1;
                }
                const Number* normals = (const Number*)drawn.words + place % BLOCK;
#pragma GCC ivdep
                for (int64_t j = 0; j < end - place; ++j) out[j] += std * normals[j];
                out += end - place;
                place = end;
            }
        }
    });
}
