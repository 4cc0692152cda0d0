// Per-sample gradients of y = W x at many positions: dW[d, p] = sum over positions t of g[t, d] x[t, p].
//
// The product is a sum of outer products, so neither operand need be turned. Inputs are copied side by side in panels of
// up to PANEL vectors, for as many positions as leave a panel in the first-level cache; gradients are read by broadcast
// from a dense copy, for positions may lie far apart (recurrent layers have the batch between them).

#include "vectors.h"

constexpr int64_t LEAST_ROWS = 64;
constexpr int64_t POSITIONS = 128;  // times PANEL vectors of 64 bytes: 32 kB

template <int M, int N>
static void tile(const float* g, int64_t g_pitch, const float* x, int64_t positions, bool more, float* out, int64_t columns,
                 int64_t pitch) {
    V acc[M][N] = {};
    if (more) {
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[m][n] = load(out + m * pitch + n * W, columns - n * W);
    }
    for (int64_t t = 0; t < positions; ++t, g += g_pitch, x += N * W) {
        const Unaligned* wide = (const Unaligned*)x;
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) {
            const V y = all(g[m]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[m][n] += y * (V)wide[n];
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(out + m * pitch + n * W, acc[m][n], columns - n * W);
}

// Rows of [positions, width] that lie ``stride`` floats apart.
struct Rows {
    const float* first;
    int64_t stride, width;
};

template <int N>
static void panel(const Rows& g, const float* x, int64_t positions, bool more, float* out, int64_t columns, int64_t pitch) {
    by_tiles(g.width, [&](int64_t row, int64_t height) {
        auto run = [&](auto kernel) { kernel(g.first + row, g.stride, x, positions, more, out + row * pitch, columns, pitch); };
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

// Adds ``positions`` of one example to out [rows, columns], or writes it where there are none before (``more`` false).
static void block(const Rows& g, const Rows& x, int64_t positions, bool more, float* packed, float* out) {
    const int64_t vectors = (x.width + W - 1) / W, count = (vectors + PANEL - 1) / PANEL;
    for (int64_t k = 0, first = 0; k < count; ++k) {
        const int64_t wide = vectors / count + (k < vectors % count), columns = x.width - first * W;
        const int64_t here = std::min(columns, wide * W);
        for (int64_t t = 0; t < positions; ++t) {
            float* to = packed + t * wide * W;
            std::memcpy(to, x.first + t * x.stride + first * W, here * sizeof(float));
            std::fill(to + here, to + wide * W, 0.0f);
        }
        float* into = out + first * W;
        switch (wide) {
            case 1: panel<1>(g, packed, positions, more, into, columns, x.width); break;
            case 2: panel<2>(g, packed, positions, more, into, columns, x.width); break;
            case 3: panel<3>(g, packed, positions, more, into, columns, x.width); break;
            default: panel<4>(g, packed, positions, more, into, columns, x.width);
        }
        first += wide;
    }
}

// g [B, positions, rows] and x [B, positions, columns], each with its strides over examples and positions (dense in the
// last dimension) -> out [B, rows, columns].
extern "C" void dpcore_contraction_grad_sample(const float* g, const float* x, float* out, int64_t batch, int64_t positions,
                                               int64_t rows, int64_t columns, int64_t g_example, int64_t g_position,
                                               int64_t x_example, int64_t x_position, int64_t threads) {
    if (!positions) std::fill(out, out + batch * rows * columns, 0.0f);
    // Fewer examples than threads: each example's rows are shared out, too, but not so few that copies of x outweigh them.
    const int64_t whole = std::max<int64_t>(batch, 1);
    const int64_t parts = std::max<int64_t>(1, std::min((threads + whole - 1) / whole, rows / LEAST_ROWS));
    const int64_t least = worth_a_thread(2.0 * positions * rows * columns / parts);
    by_threads(batch * parts, least, threads, [&](int64_t first, int64_t last) {
        const int64_t most = std::min(positions, POSITIONS), widest = (rows + parts - 1) / parts;
        Zeros<float> inputs(most * PANEL * W), gradients(most * widest);
        for (int64_t item = first; item < last; ++item) {
            const int64_t b = item / parts, row = item % parts * rows / parts, width = (item % parts + 1) * rows / parts - row;
            for (int64_t t = 0; t < positions; t += POSITIONS) {
                const int64_t here = std::min(positions - t, POSITIONS);
                const float* from = g + b * g_example + t * g_position + row;
                for (int64_t k = 0; k < here; ++k)
                    std::memcpy(&gradients[k * width], from + k * g_position, width * sizeof(float));
                block({gradients.data(), width, width}, {x + b * x_example + t * x_position, x_position, columns}, here,
                      t > 0, inputs.data(), out + (b * rows + row) * columns);
            }
        }
    });
}
