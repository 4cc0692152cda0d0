// Per-sample gradients of a 2-D convolution's weight, without unfolding.
//
// Per example dW[d, i, (j, c)] = sum over output positions (u, v) of g[u, v, d] x[u stride + i, v stride + j, c]. Where
// channels are last in memory the kw * c inputs under one row i of the kernel lie side by side, so the window of a position
// is kh dense runs, and each row of the kernel a sum of outer products that needs no unfolded copy. Where channels come
// first in memory, an example's operands and its gradient are turned, which takes little beside the product. Where runs are
// shorter than a vector (few channels), output channels lie along vectors, and a run's inputs are read by broadcast.

#include "outer_products.h"

struct Geometry {
    int64_t height, width, channels, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, out_h, out_w;
    int64_t run() const { return kernel_w * channels; }
    int64_t padded_width() const { return (width + 2 * pad_w) * channels; }
    int64_t padded() const { return (height + 2 * pad_h) * padded_width(); }
    int64_t positions() const { return out_h * out_w; }
};

struct Example {
    const Geometry& shape;
    const float *x, *g;  // padded [H', W', c] and [positions, pitch], both readable a vector beyond their end
    int64_t pitch;
    float* out;  // [d, kh, run]
};

// The inputs under the kernel's row i, at POSITIONS of the output at a time.
static void by_runs(const Example& e, float* packed) {
    const Geometry& s = e.shape;
    const float* x_at[POSITIONS];
    for (int64_t i = 0; i < s.kernel_h; ++i)
        for (int64_t first = 0; first < s.positions(); first += POSITIONS) {
            const int64_t here = std::min(s.positions() - first, POSITIONS);
            for (int64_t k = 0; k < here; ++k) {
                const int64_t u = (first + k) / s.out_w, v = (first + k) % s.out_w;
                x_at[k] = e.x + (u * s.stride_h + i) * s.padded_width() + v * s.stride_w * s.channels;
            }
            block({e.g + first * e.pitch, e.pitch, s.out_channels}, x_at, here, packed,
                  {e.out + i * s.run(), s.run(), s.kernel_h * s.run(), first > 0, {nullptr}});
        }
}

// M inputs of a run from ``j`` by broadcast, times N vectors of output channels from ``first``.
template <int M, int N>
static void channels_tile(const Example& e, int64_t i, int64_t first, int64_t j) {
    const Geometry& s = e.shape;
    V acc[M][N] = {};
    for (int64_t u = 0; u < s.out_h; ++u) {
        const float* x_at = e.x + (u * s.stride_h + i) * s.padded_width() + j;
        const float* g_at = e.g + u * s.out_w * e.pitch + first;
        for (int64_t v = 0; v < s.out_w; ++v, x_at += s.stride_w * s.channels, g_at += e.pitch) {
            const Unaligned* wide = (const Unaligned*)g_at;
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                const V y = all(x_at[m]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) acc[m][n] += y * (V)wide[n];
            }
        }
    }
    const int64_t lanes = std::min<int64_t>(N * W, s.out_channels - first);
    for (int m = 0; m < M; ++m) {
        const float* sums = (const float*)acc[m];
        for (int64_t lane = 0; lane < lanes; ++lane)
            e.out[((first + lane) * s.kernel_h + i) * s.run() + j + m] = sums[lane];
    }
}

// All of a run under the kernel's row i and N vectors of output channels, in tiles as high as registers allow.
template <int N>
static void channels_panel(const Example& e, int64_t i, int64_t first) {
    constexpr int M = std::min(12, ACCUMULATORS / N);
    const int64_t run = e.shape.run();
    int64_t at = 0;
    for (; at + M <= run; at += M) channels_tile<M, N>(e, i, first, at);
    if constexpr (M > 8) for (; at + 8 <= run; at += 8) channels_tile<8, N>(e, i, first, at);
    if constexpr (M > 4) for (; at + 4 <= run; at += 4) channels_tile<4, N>(e, i, first, at);
    if constexpr (M > 2) for (; at + 2 <= run; at += 2) channels_tile<2, N>(e, i, first, at);
    for (; at < run; ++at) channels_tile<1, N>(e, i, first, at);
}

static void by_channels(const Example& e) {
    const int64_t vectors = (e.shape.out_channels + W - 1) / W, panels = (vectors + 3) / 4;
    for (int64_t i = 0; i < e.shape.kernel_h; ++i)
        for (int64_t p = 0, v = 0; p < panels; ++p) {
            const int64_t wide = vectors / panels + (p < vectors % panels);
            switch (wide) {
                case 1: channels_panel<1>(e, i, v * W); break;
                case 2: channels_panel<2>(e, i, v * W); break;
                case 3: channels_panel<3>(e, i, v * W); break;
                default: channels_panel<4>(e, i, v * W);
            }
            v += wide;
        }
}

// The share of vector lanes that do work, when ``columns`` lie along vectors.
static double used(int64_t columns) { return double(columns) / ((columns + W - 1) / W * W); }

// to[k * to_pitch + j] = from[j * pitch + k] for j < rows and k < columns. By squares of a line's half: rows that lie a
// power of two apart share the lines of the first-level cache, which has room for eight of them.
static void turn(const float* from, int64_t pitch, int64_t rows, int64_t columns, float* to, int64_t to_pitch) {
    constexpr int64_t SIDE = 8;
    int64_t j = 0;
    for (; j + SIDE <= rows; j += SIDE) {
        int64_t k = 0;
        for (; k + SIDE <= columns; k += SIDE)
            for (int64_t b = 0; b < SIDE; ++b)
#pragma GCC unroll 8
                for (int64_t a = 0; a < SIDE; ++a) to[(k + b) * to_pitch + j + a] = from[(j + a) * pitch + k + b];
        for (; k < columns; ++k)
            for (int64_t a = 0; a < SIDE; ++a) to[k * to_pitch + j + a] = from[(j + a) * pitch + k];
    }
    for (; j < rows; ++j)
        for (int64_t k = 0; k < columns; ++k) to[k * to_pitch + j] = from[j * pitch + k];
}

static void examples(const Geometry& s, bool channels_first, const float* x, const float* g, float* out, int64_t first,
                     int64_t last) {
    // Half the lanes of a run beat the scattered stores of the other order.
    const bool runs = used(s.run()) >= 0.6 * used(s.out_channels);
    const int64_t pitch = spread(s.out_channels), pixels = s.height * s.width, of_weight = s.out_channels * s.kernel_h * s.run();
    Zeros<float> padded(s.padded() + W * 4), gradients(s.positions() * pitch + W * 4), packed(POSITIONS * PANEL * W);
    Zeros<float> unturned(channels_first ? of_weight : 0);
    for (int64_t b = first; b < last; ++b) {
        const float *x_b = x + b * pixels * s.channels, *g_b = g + b * s.positions() * s.out_channels;
        float *out_b = out + b * of_weight, *inner = &padded[s.pad_h * s.padded_width() + s.pad_w * s.channels];
        for (int64_t h = 0; h < s.height; ++h) {
            float* row = inner + h * s.padded_width();
            if (channels_first)
                turn(x_b + h * s.width, pixels, s.channels, s.width, row, s.channels);
            else
                std::memcpy(row, x_b + h * s.width * s.channels, s.width * s.channels * sizeof(float));
        }
        if (channels_first)
            turn(g_b, s.positions(), s.out_channels, s.positions(), gradients.data(), pitch);
        else
            for (int64_t t = 0; t < s.positions(); ++t)
                std::memcpy(&gradients[t * pitch], g_b + t * s.out_channels, s.out_channels * sizeof(float));
        const Example example{s, padded.data(), gradients.data(), pitch, channels_first ? unturned.data() : out_b};
        if (runs)
            by_runs(example, packed.data());
        else
            by_channels(example);
        if (!channels_first) continue;
        const int64_t window = s.kernel_h * s.kernel_w, of_one = window * s.channels;
        for (int64_t d = 0; d < s.out_channels; ++d)
            turn(&unturned[d * of_one], s.channels, window, s.channels, out_b + d * of_one, window);
    }
}

// x [B, height, width, c], g [B, out_h, out_w, d] -> out [B, d, kh, kw, c]; ``channels_first``: x [B, c, height, width],
// g [B, d, out_h, out_w] -> out [B, d, c, kh, kw].
extern "C" void dpcore_conv2d_grad_sample(const float* x, const float* g, float* out, int64_t batch, int64_t height,
                                          int64_t width, int64_t channels, int64_t out_channels, int64_t kernel_h,
                                          int64_t kernel_w, int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w,
                                          int64_t out_h, int64_t out_w, int64_t channels_first, int64_t threads) {
    if (!out_h || !out_w) std::fill(out, out + batch * out_channels * kernel_h * kernel_w * channels, 0.0f);
    const Geometry s{height, width, channels, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, out_h, out_w};
    const int64_t least = worth_a_thread(2.0 * out_h * out_w * out_channels * channels * kernel_h * kernel_w);
    by_threads(batch, least, threads,
               [&](int64_t first, int64_t last) { examples(s, channels_first, x, g, out, first, last); });
}
