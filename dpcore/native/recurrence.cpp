// The time loop of an LSTM, forward and backward, in float32 on a CPU.
//
// Examples do not meet in a recurrence, so threads share nothing: each takes its rows through all steps. W_hh is packed
// once for all steps into panels of 4 vectors, the four gates of the same W hidden units, so that a tile's
// pre-activations are complete in registers and the cell is computed there: no second pass over the gates.
// With V vectors of W floats, a tile has at most 6 rows: 24 accumulators, 4 weights and a broadcast of 32 registers.

#include "exponential.h"
#include "vectors.h"

static inline V sigmoid(V x) { return 1.0f / (1.0f + exponential(-x)); }

// Near zero 1 - 2 / (exp(2x) + 1) cancels: there Taylor's series to x^9, relative error below 1e-8 for |x| < 1/4.
static inline V hyperbolic_tangent(V x) {
    V q = x * x;
    V p = q * (62.0f / 2835) - (17.0f / 315);
    p = p * q + (2.0f / 15);
    p = p * q - (1.0f / 3);
    p = p * q + 1.0f;
    V wide = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return q < 0.0625f ? x * p : wide;
}

// Packs a [K, 4 * hidden] = W_hh^T operand into zeros: panel of hidden units, k, gate, lane.
static void pack_gates(const float* w, int64_t hidden, float* packed) {
    const int64_t panels = (hidden + W - 1) / W;
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t gate = 0; gate < 4; ++gate)
            for (int64_t lane = 0; lane < std::min<int64_t>(W, hidden - p * W); ++lane)
                for (int64_t k = 0; k < hidden; ++k)
                    packed[((p * hidden + k) * PANEL + gate) * W + lane] = w[(gate * hidden + p * W + lane) * hidden + k];
}

// Packs W_hh [4 * hidden, hidden] as right operand into zeros: panel of up to 4 vectors of columns, k, lanes.
static void pack_columns(const float* w, int64_t hidden, float* out) {
    const int64_t vectors = (hidden + W - 1) / W;
    for (int64_t first = 0; first < vectors; first += PANEL) {
        const int64_t width = std::min<int64_t>(PANEL, vectors - first) * W;
        for (int64_t k = 0; k < 4 * hidden; ++k, out += width)
            for (int64_t lane = 0; lane < std::min(width, hidden - first * W); ++lane)
                out[lane] = w[k * hidden + first * W + lane];
    }
}

struct Forward {
    const float *z, *packed;
    float *gates, *h, *c, *tanh_c;
    int64_t steps, batch, hidden;
    bool reverse;
};

template <int M>
static void cells(const Forward& a, int64_t t, int64_t row, int64_t panel, const float* h_now, float* h_next, float* c_now,
                  int64_t pitch, int64_t local) {
    const int64_t H = a.hidden, j = panel * W, n = H - j;
    V acc[M][PANEL];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < PANEL; ++g) acc[m][g] = load(a.z + (t * a.batch + row + m) * 4 * H + g * H + j, n);
    multiply<M, PANEL>(h_now + local * pitch, pitch, H, a.packed + panel * H * PANEL * W, &acc[0][0]);
    const int64_t after = a.reverse ? t : t + 1;
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
        const V i = sigmoid(acc[m][0]), f = sigmoid(acc[m][1]), g = hyperbolic_tangent(acc[m][2]), o = sigmoid(acc[m][3]);
        float* c_here = c_now + (local + m) * pitch + j;
        const V c = f * load(c_here, W) + i * g;
        const V tanh_c = hyperbolic_tangent(c), h = o * tanh_c;
        store(c_here, c, W);
        store(h_next + (local + m) * pitch + j, h, W);
        const int64_t at = t * a.batch + row + m, state = (after * a.batch + row + m) * H + j;
        float* gates = a.gates + at * 4 * H + j;
        store(gates, i, n);
        store(gates + H, f, n);
        store(gates + 2 * H, g, n);
        store(gates + 3 * H, o, n);
        store(a.tanh_c + at * H + j, tanh_c, n);
        store(a.c + state, c, n);
        store(a.h + state, h, n);
    }
}

static void forward_rows(const Forward& a, int64_t first, int64_t last) {
    const int64_t rows = last - first, H = a.hidden, panels = (H + W - 1) / W, pitch = panels * W;
    Zeros<float> h_now(rows * pitch), h_next(rows * pitch), c_now(rows * pitch);
    const int64_t start = a.reverse ? a.steps : 0;
    for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(&h_now[r * pitch], a.h + (start * a.batch + first + r) * H, H * sizeof(float));
        std::memcpy(&c_now[r * pitch], a.c + (start * a.batch + first + r) * H, H * sizeof(float));
    }
    for (int64_t s = 0; s < a.steps; ++s) {
        const int64_t t = a.reverse ? a.steps - 1 - s : s;
        for (int64_t p = 0; p < panels; ++p)
            by_tiles(rows, [&](int64_t r, int64_t height) {
                auto run = [&](auto kernel) { kernel(a, t, first + r, p, h_now.data(), h_next.data(), c_now.data(), pitch, r); };
                switch (height) {
                    case 1: run(cells<1>); break;
                    case 2: run(cells<2>); break;
                    case 3: run(cells<3>); break;
#if defined(__AVX512F__)
                    case 4: run(cells<4>); break;
                    case 5: run(cells<5>); break;
                    default: run(cells<6>);
#endif
                }
            });
        h_now.swap(h_next);
    }
}

struct Backward {
    const float *gates, *c, *tanh_c, *packed, *grad_h;
    float *delta, *dh, *dc;
    int64_t steps, batch, hidden;
    bool reverse;
};

// out[m, :] = a[m, :] packed for one panel of N vectors.
template <int M, int N>
static void write_tile(const float* a, int64_t pitch_a, int64_t depth, const float* packed, float* out, int64_t pitch) {
    V acc[M][N] = {};
    multiply<M, N>(a, pitch_a, depth, packed, &acc[0][0]);
    for (int m = 0; m < M; ++m) std::memcpy(out + m * pitch, acc[m], sizeof acc[m]);
}

template <int N>
static void multiply_tile(int64_t height, const float* a, int64_t pitch_a, int64_t depth, const float* packed, float* out,
                          int64_t pitch) {
    switch (height) {
        case 1: write_tile<1, N>(a, pitch_a, depth, packed, out, pitch); break;
        case 2: write_tile<2, N>(a, pitch_a, depth, packed, out, pitch); break;
        case 3: write_tile<3, N>(a, pitch_a, depth, packed, out, pitch); break;
#if defined(__AVX512F__)
        case 4: write_tile<4, N>(a, pitch_a, depth, packed, out, pitch); break;
        case 5: write_tile<5, N>(a, pitch_a, depth, packed, out, pitch); break;
        default: write_tile<6, N>(a, pitch_a, depth, packed, out, pitch);
#endif
    }
}

static void backward_rows(const Backward& a, int64_t first, int64_t last) {
    const int64_t rows = last - first, H = a.hidden, vectors = (H + W - 1) / W, pitch = vectors * W;
    Zeros<float> dh(rows * pitch), dc(rows * pitch);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(&dc[r * pitch], a.dc + (first + r) * H, H * sizeof(float));
    for (int64_t s = 0; s < a.steps; ++s) {
        const int64_t t = a.reverse ? s : a.steps - 1 - s, before = a.reverse ? t + 1 : t;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = t * a.batch + first + r;
            const float* gates = a.gates + at * 4 * H;
            const float* c_before = a.c + (before * a.batch + first + r) * H;
            float* delta = a.delta + at * 4 * H;
            for (int64_t j = 0; j < H; j += W) {
                const int64_t n = H - j;
                const V i = load(gates + j, n), f = load(gates + H + j, n), g = load(gates + 2 * H + j, n);
                const V o = load(gates + 3 * H + j, n), tanh_c = load(a.tanh_c + at * H + j, n);
                const V to_h = load(&dh[r * pitch + j], W) + load(a.grad_h + at * H + j, n);
                const V to_c = load(&dc[r * pitch + j], W) + to_h * o * (1.0f - tanh_c * tanh_c);
                store(delta + j, to_c * g * i * (1.0f - i), n);
                store(delta + H + j, to_c * load(c_before + j, n) * f * (1.0f - f), n);
                store(delta + 2 * H + j, to_c * i * (1.0f - g * g), n);
                store(delta + 3 * H + j, to_h * tanh_c * o * (1.0f - o), n);
                store(&dc[r * pitch + j], to_c * f, W);
            }
        }
        const float* packed = a.packed;
        for (int64_t v = 0; v < vectors; v += PANEL) {
            const int64_t width = std::min<int64_t>(PANEL, vectors - v);
            by_tiles(rows, [&](int64_t r, int64_t height) {
                const float* left = a.delta + (t * a.batch + first + r) * 4 * H;
                float* out = &dh[r * pitch + v * W];
                switch (width) {
                    case 1: multiply_tile<1>(height, left, 4 * H, 4 * H, packed, out, pitch); break;
                    case 2: multiply_tile<2>(height, left, 4 * H, 4 * H, packed, out, pitch); break;
                    case 3: multiply_tile<3>(height, left, 4 * H, 4 * H, packed, out, pitch); break;
                    default: multiply_tile<4>(height, left, 4 * H, 4 * H, packed, out, pitch);
                }
            });
            packed += 4 * H * width * W;
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(a.dh + (first + r) * H, &dh[r * pitch], H * sizeof(float));
        std::memcpy(a.dc + (first + r) * H, &dc[r * pitch], H * sizeof(float));
    }
}

extern "C" {

// z [T, B, 4H]; w [4H, H]; h, c [T + 1, B, H], their first state filled in -> gates [T, B, 4H], tanh_c [T, B, H], h, c.
// Each element of z is read just before the same one of gates is written: they may be one tensor.
void dpcore_lstm_forward(const float* z, const float* w, float* gates, float* h, float* c, float* tanh_c, int64_t steps,
                         int64_t batch, int64_t hidden, int64_t reverse, int64_t threads) {
    Zeros<float> packed((hidden + W - 1) / W * hidden * PANEL * W);
    pack_gates(w, hidden, packed.data());
    const Forward a{z, packed.data(), gates, h, c, tanh_c, steps, batch, hidden, reverse != 0};
    by_threads(batch, ROWS, threads, [&](int64_t first, int64_t last) { forward_rows(a, first, last); });
}

// grad_h [T, B, H]; dc [B, H]: gradient at the last c -> delta [T, B, 4H], dh and dc [B, H] at the first states. delta
// may be gates, likewise.
void dpcore_lstm_backward(const float* gates, const float* c, const float* tanh_c, const float* w, const float* grad_h,
                          float* delta, float* dh, float* dc, int64_t steps, int64_t batch, int64_t hidden, int64_t reverse,
                          int64_t threads) {
    Zeros<float> packed((hidden + W - 1) / W * 4 * hidden * W);
    pack_columns(w, hidden, packed.data());
    const Backward a{gates, c, tanh_c, packed.data(), grad_h, delta, dh, dc, steps, batch, hidden, reverse != 0};
    by_threads(batch, ROWS, threads, [&](int64_t first, int64_t last) { backward_rows(a, first, last); });
}
}
