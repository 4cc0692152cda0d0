// Per-sample gradients of a 2-D convolution's weight, channels last, without unfolding.
//
// Per example dW[d, i, (j, c)] = sum over output positions (u, v) of g[u, v, d] x[u stride + i, v stride + j, c]. In
// channels-last memory the kw * c inputs under one row i of the kernel lie side by side, so the window of a position is
// kh dense runs and the product needs no unfolded copy. Two orders of the same product: runs along vectors and output
// channels by broadcast, or the reverse where runs are shorter than a vector (few channels).

#include "vectors.h"

struct Geometry {
    int64_t height, width, channels, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, out_h, out_w;
    int64_t run() const { return kernel_w * channels; }
    int64_t padded_width() const { return (width + 2 * pad_w) * channels; }
    int64_t padded() const { return (height + 2 * pad_h) * padded_width(); }
};

// acc[m][n] = sum over positions of wide[n] * narrow[m]: wide a vector load, narrow a broadcast.
template <int M, int N>
static inline void accumulate(const Geometry& s, const float* x, const float* g, int64_t pitch, bool runs_are_wide,
                              V (&acc)[M][N]) {
    for (int64_t u = 0; u < s.out_h; ++u) {
        const float* x_at = x + u * s.stride_h * s.padded_width();
        const float* g_at = g + u * s.out_w * pitch;
        for (int64_t v = 0; v < s.out_w; ++v, x_at += s.stride_w * s.channels, g_at += pitch) {
            const Unaligned* wide = (const Unaligned*)(runs_are_wide ? x_at : g_at);
            const float* narrow = runs_are_wide ? g_at : x_at;
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                const V y = all(narrow[m]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) acc[m][n] += y * (V)wide[n];
            }
        }
    }
}

struct Example {
    const Geometry& shape;
    const float *x, *g;  // padded [H', W', c] and [positions, pitch], both readable a vector beyond their end
    int64_t pitch;
    float* out;  // [d, kh, run]
};

template <int M, int N>
static void runs_tile(const Example& e, int64_t i, int64_t first, int64_t d) {
    const Geometry& s = e.shape;
    const int64_t run = s.run();
    V acc[M][N] = {};
    accumulate<M, N>(s, e.x + i * s.padded_width() + first, e.g + d, e.pitch, true, acc);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N && first + n * W < run; ++n)
            store(e.out + ((d + m) * s.kernel_h + i) * run + first + n * W, acc[m][n], run - first - n * W);
}

template <int M, int N>
static void channels_tile(const Example& e, int64_t i, int64_t first, int64_t j) {
    const Geometry& s = e.shape;
    const int64_t run = s.run();
    V acc[M][N] = {};
    accumulate<M, N>(s, e.x + i * s.padded_width() + j, e.g + first, e.pitch, false, acc);
    const int64_t lanes = std::min<int64_t>(N * W, s.out_channels - first);
    for (int m = 0; m < M; ++m) {
        const float* sums = (const float*)acc[m];
        for (int64_t lane = 0; lane < lanes; ++lane)
            e.out[((first + lane) * s.kernel_h + i) * run + j + m] = sums[lane];
    }
}

template <int M, int N>
static void tile(const Example& e, bool runs, int64_t i, int64_t first, int64_t at) {
    if (runs)
        runs_tile<M, N>(e, i, first, at);
    else
        channels_tile<M, N>(e, i, first, at);
}

// All rows [0, rows) of one kernel row i and the N vectors from ``first``, in tiles as high as registers allow.
template <int N>
static void panel(const Example& e, bool runs, int64_t i, int64_t first, int64_t rows) {
    constexpr int M = std::min(12, ACCUMULATORS / N);
    int64_t at = 0;
    for (; at + M <= rows; at += M) tile<M, N>(e, runs, i, first, at);
    if constexpr (M > 8) for (; at + 8 <= rows; at += 8) tile<8, N>(e, runs, i, first, at);
    if constexpr (M > 4) for (; at + 4 <= rows; at += 4) tile<4, N>(e, runs, i, first, at);
    if constexpr (M > 2) for (; at + 2 <= rows; at += 2) tile<2, N>(e, runs, i, first, at);
    for (; at < rows; ++at) tile<1, N>(e, runs, i, first, at);
}

static void grad_sample(const Example& e, bool runs) {
    const Geometry& s = e.shape;
    const int64_t columns = runs ? s.run() : s.out_channels, rows = runs ? s.out_channels : s.run();
    const int64_t vectors = (columns + W - 1) / W, panels = (vectors + 3) / 4;
    for (int64_t i = 0; i < s.kernel_h; ++i)
        for (int64_t p = 0, v = 0; p < panels; ++p) {
            const int64_t wide = vectors / panels + (p < vectors % panels);
            switch (wide) {
                case 1: panel<1>(e, runs, i, v * W, rows); break;
                case 2: panel<2>(e, runs, i, v * W, rows); break;
                case 3: panel<3>(e, runs, i, v * W, rows); break;
                default: panel<4>(e, runs, i, v * W, rows);
            }
            v += wide;
        }
}

// The share of vector lanes that do work, when ``columns`` lie along vectors.
static double used(int64_t columns) { return double(columns) / ((columns + W - 1) / W * W); }

static void examples(const Geometry& s, const float* x, const float* g, float* out, int64_t first, int64_t last) {
    // Half the lanes of a run beat the scattered stores of the other order.
    const bool runs = used(s.run()) >= 0.6 * used(s.out_channels);
    const int64_t positions = s.out_h * s.out_w;
    Zeros<float> padded(s.padded() + W * 4), gradients(positions * s.out_channels + W * 4);
    for (int64_t b = first; b < last; ++b) {
        for (int64_t h = 0; h < s.height; ++h)
            std::memcpy(&padded[(h + s.pad_h) * s.padded_width() + s.pad_w * s.channels],
                        x + (b * s.height + h) * s.width * s.channels, s.width * s.channels * sizeof(float));
        std::memcpy(gradients.data(), g + b * positions * s.out_channels, positions * s.out_channels * sizeof(float));
        grad_sample({s, padded.data(), gradients.data(), s.out_channels, out + b * s.out_channels * s.kernel_h * s.run()},
                    runs);
    }
}

// x [B, height, width, c], g [B, out_h, out_w, d] -> out [B, d, kh, kw, c].
extern "C" void dpcore_conv2d_grad_sample(const float* x, const float* g, float* out, int64_t batch, int64_t height,
                                          int64_t width, int64_t channels, int64_t out_channels, int64_t kernel_h,
                                          int64_t kernel_w, int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w,
                                          int64_t out_h, int64_t out_w, int64_t threads) {
    const Geometry s{height, width, channels, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, out_h, out_w};
    const int64_t least = worth_a_thread(2.0 * out_h * out_w * out_channels * channels * kernel_h * kernel_w);
    by_threads(batch, least, threads, [&](int64_t first, int64_t last) { examples(s, x, g, out, first, last); });
}
