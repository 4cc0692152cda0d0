// Sums over positions of outer products g xT, in tiles that stay in registers: what gradients of weights are.
//
// Neither operand need be turned. Inputs are copied side by side in panels of up to PANEL vectors, for as many positions as
// leave a panel in the first-level cache; gradients are read by broadcast from a dense copy, for positions may lie far apart
// (recurrent layers have the batch between them).
#pragma once

#include "vectors.h"

constexpr int64_t POSITIONS = 128;  // times PANEL vectors of 64 bytes: 32 kB

// Squares of what is written, a sum for each lane of a vector; none are taken where ``lanes`` is null. Up to ACCUMULATORS
// squares are added up in float32, then those sums in float64.
struct Squares {
    double* lanes;
    template <int M, int N>
    void take(const V (&acc)[M][N]) const {
        V sum{};
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum += acc[m][n] * acc[m][n];
        for (int lane = 0; lane < W; ++lane) lanes[lane] += double(sum[lane]);
    }
};

template <int M, int N>
static void tile(const float* g, int64_t g_pitch, const float* x, int64_t positions, bool more, float* out, int64_t columns,
                 int64_t pitch, Squares squares) {
    V acc[M][N] = {};
    if (more) {
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[m][n] = load(out + m * pitch + n * W, columns - n * W);
    }
    for (int64_t t = 0; t < positions; ++t, g += g_pitch, x += N * W) {
        V y[M];  // as in multiply() of vectors.h
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) y[m] = all(g[m]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const V wide = *(const Unaligned*)(x + n * W);
#pragma GCC unroll 6
            for (int m = 0; m < M; ++m) acc[m][n] += y[m] * wide;
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(out + m * pitch + n * W, acc[m][n], columns - n * W);
    // Beyond the last column both operands were filled up with zeros.
    if (squares.lanes) squares.take(acc);
}

// Output gradients [positions, width] that lie ``stride`` floats apart.
struct Rows {
    const float* first;
    int64_t stride, width;
};

// Where a product goes: [g.width, columns] whose rows lie ``pitch`` apart, written, or added to (``more``).
struct Target {
    float* first;
    int64_t columns, pitch;
    bool more;
    Squares squares;
};

template <int N>
static void panel(const Rows& g, const float* x, int64_t positions, const Target& to, int64_t column) {
    by_tiles(g.width, [&](int64_t row, int64_t height) {
        auto run = [&](auto kernel) {
            kernel(g.first + row, g.stride, x, positions, to.more, to.first + row * to.pitch + column, to.columns - column,
                   to.pitch, to.squares);
        };
        switch (height) {
            case 1: run(tile<1, N>); break;
            case 2: run(tile<2, N>); break;
            case 3: run(tile<3, N>); break;
#if defined(__AVX512F__)
            case 4: run(tile<4, N>); break;
            case 5: run(tile<5, N>); break;
            default: run(tile<6, N>);
#endif
        }
    });
}

// One product over ``positions``; x_at[t] points to the inputs [columns] of position t.
static void block(const Rows& g, const float* const* x_at, int64_t positions, float* packed, const Target& to) {
    const int64_t vectors = (to.columns + W - 1) / W, count = (vectors + PANEL - 1) / PANEL;
    for (int64_t k = 0, first = 0; k < count; ++k) {
        const int64_t wide = vectors / count + (k < vectors % count);
        const int64_t here = std::min(to.columns - first * W, wide * W);
        for (int64_t t = 0; t < positions; ++t) {
            float* copy = packed + t * wide * W;
            std::memcpy(copy, x_at[t] + first * W, here * sizeof(float));
            std::fill(copy + here, copy + wide * W, 0.0f);
        }
        switch (wide) {
            case 1: panel<1>(g, packed, positions, to, first * W); break;
            case 2: panel<2>(g, packed, positions, to, first * W); break;
            case 3: panel<3>(g, packed, positions, to, first * W); break;
            default: panel<4>(g, packed, positions, to, first * W);
        }
        first += wide;
    }
}

// Floats between rows of a copy, so that the rows' beginnings lie in all sets of the first-level cache: an odd number of
// its lines.
static int64_t spread(int64_t width) { return ((width + 15) / 16 | 1) * 16; }

// What a thread copies operands to.
struct Copies {
    int64_t pitch;
    Zeros<float> inputs, gradients;
    const float* x_at[POSITIONS];
    Copies(int64_t most, int64_t widest) : pitch(spread(widest)), inputs(most * PANEL * W), gradients(most * pitch) {}
};

// The rows of a product sum over positions g xT, g [positions, width] and x [positions, columns], are written to ``out``
// [width, columns]. Returns the sum of their squares, where that is asked for.
static double write_product(const float* g, int64_t g_position, const float* x, int64_t x_position, int64_t positions,
                            int64_t width, int64_t columns, float* out, bool squared, Copies& copies) {
    double lanes[W] = {};
    for (int64_t t = 0; t < positions; t += POSITIONS) {
        const int64_t here = std::min(positions - t, POSITIONS);
        for (int64_t k = 0; k < here; ++k) {
            std::memcpy(&copies.gradients[k * copies.pitch], g + (t + k) * g_position, width * sizeof(float));
            copies.x_at[k] = x + (t + k) * x_position;
        }
        const Squares taken{squared && t + here == positions ? lanes : nullptr};
        block({copies.gradients.data(), copies.pitch, width}, copies.x_at, here, copies.inputs.data(),
              {out, columns, columns, t > 0, taken});
    }
    double total = 0.0;
    for (int lane = 0; lane < W; ++lane) total += lanes[lane];
    return total;
}

constexpr int64_t LEAST_ROWS = 64;
constexpr int64_t MOST_ROWS = 768;  // times POSITIONS floats: 400 kB, which stay in the second-level cache

// How many parts to cut rows into: so many that all threads have some, unless these would be few, and none is too large.
static int64_t parts_of(int64_t rows, int64_t threads) {
    return std::max(std::max<int64_t>(1, std::min(threads, rows / LEAST_ROWS)), (rows + MOST_ROWS - 1) / MOST_ROWS);
}
