// Gradients of y = W x at many positions: dW[d, p] = sum over positions t of g[t, d] x[t, p], by example, or clipped and
// summed over the examples; and the norms of those by example without the gradients.

#include "outer_products.h"

// g [B, positions, rows] and x [B, positions, columns], each with its strides over examples and positions (dense in the
// last dimension) -> out [B, rows, columns], and, where ``squares`` [B] is not null, its squared norms.
extern "C" void dpcore_contraction_grad_sample(const float* g, const float* x, float* out, double* squares, int64_t batch,
                                               int64_t positions, int64_t rows, int64_t columns, int64_t g_example,
                                               int64_t g_position, int64_t x_example, int64_t x_position, int64_t threads) {
    if (!positions) std::fill(out, out + batch * rows * columns, 0.0f);
    // Fewer examples than threads: each example's rows are shared out, too, but not so few that copies of x outweigh them.
    const int64_t whole = std::max<int64_t>(batch, 1);
    const int64_t parts = parts_of(rows, (threads + whole - 1) / whole);
    const int64_t least = worth_a_thread(2.0 * positions * rows * columns / parts);
    Zeros<double> of_parts(squares ? batch * parts : 0);
    by_threads(batch * parts, least, threads, [&](int64_t first, int64_t last) {
        Copies copies(std::min(positions, POSITIONS), (rows + parts - 1) / parts);
        for (int64_t item = first; item < last; ++item) {
            const int64_t b = item / parts, row = item % parts * rows / parts, width = (item % parts + 1) * rows / parts - row;
            const double sum = write_product(g + b * g_example + row, g_position, x + b * x_example, x_position, positions, width,
                                             columns, out + (b * rows + row) * columns, squares != nullptr, copies);
            if (squares) of_parts[item] = sum;
        }
    });
    if (!squares) return;
    for (int64_t b = 0; b < batch; ++b) {
        squares[b] = 0.0;
        for (int64_t part = 0; part < parts; ++part) squares[b] += of_parts[b * parts + part];
    }
}

// out [rows, columns], whose rows lie ``pitch`` apart, += sum over b of factors[b] dW of example b; operands as above. An
// example at a factor of 0 is left out, whatever its values.
extern "C" void dpcore_contraction_clipped_sum(const float* g, const float* x, float* out, const float* factors, int64_t batch,
                                               int64_t positions, int64_t rows, int64_t columns, int64_t g_example,
                                               int64_t g_position, int64_t x_example, int64_t x_position, int64_t pitch,
                                               int64_t threads) {
    const int64_t parts = parts_of(rows, threads);
    by_threads(parts, worth_a_thread(2.0 * batch * positions * rows * columns / parts), threads, [&](int64_t from, int64_t to) {
        Copies copies(std::min(batch * positions, POSITIONS), (rows + parts - 1) / parts);
        for (int64_t part = from; part < to; ++part) {
            const int64_t row = part * rows / parts, width = (part + 1) * rows / parts - row;
            int64_t here = 0;
            auto add = [&] {
                block({copies.gradients.data(), copies.pitch, width}, copies.x_at, here, copies.inputs.data(),
                      {out + row * pitch, columns, pitch, true, {nullptr}});
                here = 0;
            };
            for (int64_t b = 0; b < batch; ++b) {
                if (factors[b] == 0.0f) continue;
                for (int64_t t = 0; t < positions; ++t) {
                    const float* unscaled = g + b * g_example + t * g_position + row;
                    float* scaled = &copies.gradients[here * copies.pitch];
                    for (int64_t k = 0; k < width; ++k) scaled[k] = factors[b] * unscaled[k];
                    copies.x_at[here] = x + b * x_example + t * x_position;
                    if (++here == POSITIONS) add();
                }
            }
            if (here) add();
        }
    });
}

#if defined(__AVX512F__)
constexpr int DOTS = 4;
static float total(V v) { return _mm512_reduce_add_ps((__m512)v); }
#else
constexpr int DOTS = 2;
static float total(V v) {
    float sum = 0.0f;
    for (int lane = 0; lane < W; ++lane) sum += v[lane];
    return sum;
}
#endif
constexpr int64_t GRAM_BLOCK = 512;  // products that are added up in float32, as in dpcore.numerics.rounding

// dots[m][n] = a_m . b_n for M and N rows of ``width`` floats.
template <int M, int N>
static void products(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t width, double (*dots)[DOTS]) {
    for (int m = 0; m < M; ++m) std::fill(dots[m], dots[m] + N, 0.0);
    for (int64_t first = 0; first < width; first += GRAM_BLOCK) {
        const int64_t last = std::min(width, first + GRAM_BLOCK);
        V acc[M][N] = {};
        auto step = [&](int64_t k, auto&& read) {
            V left[M], right[N];
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) left[m] = read(a + m * a_pitch + k);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) right[n] = read(b + n * b_pitch + k);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) acc[m][n] += left[m] * right[n];
        };
        int64_t k = first;
        for (; k + W <= last; k += W) step(k, [](const float* p) { return (V)*(const Unaligned*)p; });
        if (k < last) step(k, [&](const float* p) { return load(p, last - k); });
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) dots[m][n] += total(acc[m][n]);
    }
}

// Floats of a vector. A term of a dot product is rounded in its lane's share of a block, and then with the other lanes.
extern "C" int64_t dpcore_lanes() { return W; }

// Calls what ``run`` makes of a height and a width from 1 to DOTS, as types.
template <typename F>
static void with_size(int64_t size, F&& run) {
    switch (size) {
        case 1: run(std::integral_constant<int, 1>()); break;
#if defined(__AVX512F__)
        case 2: run(std::integral_constant<int, 2>()); break;
        case 3: run(std::integral_constant<int, 3>()); break;
#endif
        default: run(std::integral_constant<int, DOTS>());
    }
}

// The squared norms of dW by example from Gram matrices: |dW|^2 = sum over t, s of (x_t . x_s)(g_t . g_s), by half of them.
// norms [B] those, scales [B] (sum over t of |x_t||g_t|)^2, largest [B] sum over t of max(|x_t|^2, |g_t|^2); operands as
// above. Products of vectors are float32's over GRAM_BLOCK elements; all else is in float64.
extern "C" void dpcore_contraction_norms(const float* g, const float* x, double* norms, double* scales, double* largest,
                                         int64_t batch, int64_t positions, int64_t rows, int64_t columns, int64_t g_example,
                                         int64_t g_position, int64_t x_example, int64_t x_position, int64_t threads) {
    const double flops = double(positions) * (positions + 1) * (rows + columns);
    by_threads(batch, worth_a_thread(flops), threads, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) {
            double norm = 0.0, scale = 0.0, most = 0.0;
            for (int64_t t = 0; t < positions; t += DOTS)
                for (int64_t s = t; s < positions; s += DOTS) {
                    double of_x[DOTS][DOTS], of_g[DOTS][DOTS];
                    const int64_t height = std::min<int64_t>(DOTS, positions - t), width = std::min<int64_t>(DOTS, positions - s);
                    const float *x_b = x + b * x_example, *g_b = g + b * g_example;
                    with_size(height, [&](auto m) {
                        with_size(width, [&](auto n) {
                            products<m(), n()>(x_b + t * x_position, x_position, x_b + s * x_position, x_position, columns, of_x);
                            products<m(), n()>(g_b + t * g_position, g_position, g_b + s * g_position, g_position, rows, of_g);
                        });
                    });
                    for (int64_t m = 0; m < height; ++m)
                        for (int64_t n = 0; n < width; ++n) {
                            const double product = of_x[m][n] * of_g[m][n];
                            norm += s > t ? 2.0 * product : product;
                            if (s == t && m == n) {
                                scale += __builtin_sqrt(product);
                                most += std::max(of_x[m][n], of_g[m][n]);
                            }
                        }
                }
            norms[b] = norm;
            scales[b] = scale * scale;
            largest[b] = most;
        }
    });
}
