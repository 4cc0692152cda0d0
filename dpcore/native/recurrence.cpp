// The time loops of an LSTM, a GRU and a plain RNN, forward and backward, in float32 on a CPU.
//
// Examples do not meet in a recurrence, so threads share nothing: each takes its rows through all steps. A step is a
// product of the rows' states with W_hh, whose panels were packed once for all steps, and then the cell's own few lines on
// vectors of W hidden units. Backward a step is the cell's lines, then the product.

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

struct Sizes {
    int64_t steps, batch, hidden;
    bool reverse;
    int64_t units() const { return (hidden + W - 1) / W; }  // in vectors
};

// A vector of hidden units, j and on, of one example at one step: its row of [B, .], of [T, B, .], and of the states
// [T + 1, B, .] before and after the step; n hidden units are left from j on.
struct Place {
    int64_t row, at, before, after, j, n;
};

// Packs the right operand of a product into zeros, in panels of up to 4 vectors: panel, k, lanes. Its columns are the
// hidden units of each gate, each gate's filled up to whole vectors; column c at k is w[c * step + k * step_k].
static void pack(const float* w, int64_t gates, int64_t step, int64_t depth, int64_t step_k, int64_t hidden, float* out) {
    const int64_t units = (hidden + W - 1) / W, vectors = gates * units;
    for (int64_t first = 0; first < vectors; first += PANEL) {
        const int64_t width = std::min<int64_t>(PANEL, vectors - first);
        for (int64_t v = 0; v < width; ++v) {
            const int64_t gate = (first + v) / units, j = (first + v) % units * W;
            const float* from = w + (gate * hidden + j) * step;
            for (int64_t k = 0; k < depth; ++k)
                for (int64_t lane = 0; lane < std::min<int64_t>(W, hidden - j); ++lane)
                    out[(k * width + v) * W + lane] = from[lane * step + k * step_k];
        }
        out += depth * width * W;
    }
}

// out[m, :] = a[m, :] packed for one panel of N vectors.
template <int M, int N>
static void write_tile(const float* a, int64_t depth, const float* packed, float* out, int64_t pitch) {
    V acc[M][N] = {};
    multiply<M, N>(a, depth, depth, packed, &acc[0][0]);
    for (int m = 0; m < M; ++m) std::memcpy(out + m * pitch, acc[m], sizeof acc[m]);
}

template <int N>
static void multiply_tile(int64_t height, const float* a, int64_t depth, const float* packed, float* out, int64_t pitch) {
    switch (height) {
        case 1: write_tile<1, N>(a, depth, packed, out, pitch); break;
        case 2: write_tile<2, N>(a, depth, packed, out, pitch); break;
        case 3: write_tile<3, N>(a, depth, packed, out, pitch); break;
#if defined(__AVX512F__)
        case 4: write_tile<4, N>(a, depth, packed, out, pitch); break;
        case 5: write_tile<5, N>(a, depth, packed, out, pitch); break;
        default: write_tile<6, N>(a, depth, packed, out, pitch);
#endif
    }
}

// out [rows, vectors] = a [rows, depth] packed.
static void multiply_rows(int64_t rows, const float* a, int64_t depth, const float* packed, int64_t vectors, float* out) {
    for (int64_t v = 0; v < vectors; v += PANEL) {
        const int64_t width = std::min<int64_t>(PANEL, vectors - v);
        by_tiles(rows, [&](int64_t r, int64_t height) {
            const float* left = a + r * depth;
            float* here = out + (r * vectors + v) * W;
            switch (width) {
                case 1: multiply_tile<1>(height, left, depth, packed, here, vectors * W); break;
                case 2: multiply_tile<2>(height, left, depth, packed, here, vectors * W); break;
                case 3: multiply_tile<3>(height, left, depth, packed, here, vectors * W); break;
                default: multiply_tile<4>(height, left, depth, packed, here, vectors * W);
            }
        });
        packed += depth * width * W;
    }
}

// From the first state in h [T + 1, B, H] all others. Cell::forward(sums, pitch, place): the new state's vector, from
// the vectors of W_hh h of each gate, which lie ``pitch`` floats apart.
template <typename Cell>
static void forward(const Cell& cell, const Sizes& a, const float* w, float* h, int64_t threads) {
    const int64_t H = a.hidden, pitch = a.units() * W, vectors = Cell::GATES * a.units();
    Zeros<float> packed(vectors * H * W);
    pack(w, Cell::GATES, H, H, 1, H, packed.data());
    by_threads(a.batch, ROWS, threads, [&](int64_t first, int64_t last) {
        const int64_t rows = last - first;
        Zeros<float> sums(rows * vectors * W);
        for (int64_t s = 0; s < a.steps; ++s) {
            const int64_t t = a.reverse ? a.steps - 1 - s : s, now = a.reverse ? t + 1 : t, next = a.reverse ? t : t + 1;
            multiply_rows(rows, h + (now * a.batch + first) * H, H, packed.data(), vectors, sums.data());
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < H; j += W) {
                    const int64_t row = first + r;
                    const Place p{row, t * a.batch + row, now * a.batch + row, next * a.batch + row, j, H - j};
                    store(h + p.after * H + j, cell.forward(&sums[r * vectors * W + j], pitch, p), p.n);
                }
        }
    });
}

// From grad_h [T, B, H] the gradients at all pre-activations, and dh [B, H] at the first state. Cell::backward(dh, place)
// writes those of one vector and returns what goes past the step's product. ``delta`` [T, B, GATES * H]: the gradients at
// W_hh h, of those.
template <typename Cell>
static void backward(const Cell& cell, const Sizes& a, const float* w, const float* grad_h, const float* delta, float* dh,
                     int64_t threads) {
    const int64_t H = a.hidden, depth = Cell::GATES * H, pitch = a.units() * W;
    Zeros<float> packed(pitch * depth);
    pack(w, 1, 1, depth, H, H, packed.data());
    by_threads(a.batch, ROWS, threads, [&](int64_t first, int64_t last) {
        const int64_t rows = last - first;
        Zeros<float> through(rows * pitch), past(rows * pitch);
        for (int64_t s = 0; s < a.steps; ++s) {
            const int64_t t = a.reverse ? s : a.steps - 1 - s, before = a.reverse ? t + 1 : t, after = a.reverse ? t : t + 1;
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < H; j += W) {
                    const int64_t row = first + r;
                    const Place p{row, t * a.batch + row, before * a.batch + row, after * a.batch + row, j, H - j};
                    float* beside = &past[r * pitch + j];
                    const V to_h = load(&through[r * pitch + j], W) + load(beside, W) + load(grad_h + p.at * H + j, p.n);
                    store(beside, cell.backward(to_h, p), W);
                }
            multiply_rows(rows, delta + (t * a.batch + first) * depth, depth, packed.data(), a.units(), through.data());
        }
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < H; j += W)
                store(dh + (first + r) * H + j, load(&through[r * pitch + j], W) + load(&past[r * pitch + j], W), H - j);
    });
}

// Gates in the order i, f, g, o.
struct Lstm {
    static constexpr int GATES = 4;
    int64_t H;
    const float* z;
    float *gates, *c, *tanh_c, *delta, *dc;

    V forward(const float* sums, int64_t pitch, const Place& p) const {
        const float* from = z + p.at * 4 * H + p.j;
        auto pre = [&](int g) { return load(sums + g * pitch, W) + load(from + g * H, p.n); };
        const V i = sigmoid(pre(0)), f = sigmoid(pre(1)), g = hyperbolic_tangent(pre(2)), o = sigmoid(pre(3));
        const V now = f * load(c + p.before * H + p.j, p.n) + i * g, tanh_now = hyperbolic_tangent(now);
        float* to = gates + p.at * 4 * H + p.j;
        store(to, i, p.n);
        store(to + H, f, p.n);
        store(to + 2 * H, g, p.n);
        store(to + 3 * H, o, p.n);
        store(c + p.after * H + p.j, now, p.n);
        store(tanh_c + p.at * H + p.j, tanh_now, p.n);
        return o * tanh_now;
    }

    V backward(V to_h, const Place& p) const {
        const float* from = gates + p.at * 4 * H + p.j;
        const V i = load(from, p.n), f = load(from + H, p.n), g = load(from + 2 * H, p.n), o = load(from + 3 * H, p.n);
        const V now = load(tanh_c + p.at * H + p.j, p.n);
        float* to_before = dc + p.row * H + p.j;
        const V to_c = load(to_before, p.n) + to_h * o * (1.0f - now * now);
        float* to = delta + p.at * 4 * H + p.j;
        store(to, to_c * g * i * (1.0f - i), p.n);
        store(to + H, to_c * load(c + p.before * H + p.j, p.n) * f * (1.0f - f), p.n);
        store(to + 2 * H, to_c * i * (1.0f - g * g), p.n);
        store(to + 3 * H, to_h * now * o * (1.0f - o), p.n);
        store(to_before, to_c * f, p.n);
        return V{};
    }
};

// Gates in the order r, u, n.
struct Gru {
    static constexpr int GATES = 3;
    int64_t H;
    const float *z, *bias, *h;
    float *gates, *recurrent_n, *delta, *recurrent_delta;

    V forward(const float* sums, int64_t pitch, const Place& p) const {
        const float* from = z + p.at * 3 * H + p.j;
        auto recurrent = [&](int g) {
            const V sum = load(sums + g * pitch, W);
            return bias ? sum + load(bias + g * H + p.j, p.n) : sum;
        };
        const V r = sigmoid(load(from, p.n) + recurrent(0)), u = sigmoid(load(from + H, p.n) + recurrent(1));
        const V of_n = recurrent(2), n = hyperbolic_tangent(load(from + 2 * H, p.n) + r * of_n);
        float* to = gates + p.at * 3 * H + p.j;
        store(to, r, p.n);
        store(to + H, u, p.n);
        store(to + 2 * H, n, p.n);
        store(recurrent_n + p.at * H + p.j, of_n, p.n);
        return n + u * (load(h + p.before * H + p.j, p.n) - n);
    }

    V backward(V to_h, const Place& p) const {
        const float* from = gates + p.at * 3 * H + p.j;
        const V r = load(from, p.n), u = load(from + H, p.n), n = load(from + 2 * H, p.n);
        const V of_n = load(recurrent_n + p.at * H + p.j, p.n), h_before = load(h + p.before * H + p.j, p.n);
        const V to_n = to_h * (1.0f - u) * (1.0f - n * n), to_u = to_h * (h_before - n) * u * (1.0f - u);
        const V to_r = to_n * of_n * r * (1.0f - r);
        for (float* all : {delta, recurrent_delta}) {
            float* to = all + p.at * 3 * H + p.j;
            store(to, to_r, p.n);
            store(to + H, to_u, p.n);
            store(to + 2 * H, all == delta ? to_n : to_n * r, p.n);
        }
        return to_h * u;
    }
};

struct Rnn {
    static constexpr int GATES = 1;
    int64_t H;
    bool relu;
    const float *z, *h;
    float* delta;

    V forward(const float* sums, int64_t, const Place& p) const {
        const V x = load(sums, W) + load(z + p.at * H + p.j, p.n);
        return !relu ? hyperbolic_tangent(x) : x < 0.0f ? V{} : x;  // NaN stays NaN
    }

    V backward(V to_h, const Place& p) const {
        const V now = load(h + p.after * H + p.j, p.n);
        // A product, not a choice: a NaN is not lost.
        store(delta + p.at * H + p.j, to_h * (!relu ? 1.0f - now * now : now > 0.0f ? all(1.0f) : V{}), p.n);
        return V{};
    }
};

// z [T, B, GATES * H]; w [GATES * H, H]; states [T + 1, B, H], their first one filled in. Each element of z is read just
// before the same one of ``gates`` is written, and each of ``gates`` before that of ``delta``: they may be one tensor.
extern "C" {

// -> gates [T, B, 4H], tanh_c [T, B, H], h, c.
void dpcore_lstm_forward(const float* z, const float* w, float* gates, float* h, float* c, float* tanh_c, int64_t steps,
                         int64_t batch, int64_t hidden, int64_t reverse, int64_t threads) {
    const Lstm cell{hidden, z, gates, c, tanh_c, nullptr, nullptr};
    forward(cell, {steps, batch, hidden, reverse != 0}, w, h, threads);
}

// grad_h [T, B, H]; dc [B, H]: gradient at the last c -> delta [T, B, 4H], dh and dc [B, H] at the first states.
void dpcore_lstm_backward(float* gates, float* c, float* tanh_c, const float* w, const float* grad_h, float* delta, float* dh,
                          float* dc, int64_t steps, int64_t batch, int64_t hidden, int64_t reverse, int64_t threads) {
    const Lstm cell{hidden, nullptr, gates, c, tanh_c, delta, dc};
    backward(cell, {steps, batch, hidden, reverse != 0}, w, grad_h, delta, dh, threads);
}

// bias [3H] or null -> gates [T, B, 3H], recurrent_n [T, B, H]: n's of W_hh h + bias, h.
void dpcore_gru_forward(const float* z, const float* w, const float* bias, float* gates, float* recurrent_n, float* h,
                        int64_t steps, int64_t batch, int64_t hidden, int64_t reverse, int64_t threads) {
    const Gru cell{hidden, z, bias, h, gates, recurrent_n, nullptr, nullptr};
    forward(cell, {steps, batch, hidden, reverse != 0}, w, h, threads);
}

// grad_h [T, B, H] -> the gradients at z and at W_hh h + bias, delta and recurrent_delta [T, B, 3H], and dh [B, H].
void dpcore_gru_backward(float* gates, float* recurrent_n, const float* h, const float* w, const float* grad_h, float* delta,
                         float* recurrent_delta, float* dh, int64_t steps, int64_t batch, int64_t hidden, int64_t reverse,
                         int64_t threads) {
    const Gru cell{hidden, nullptr, nullptr, h, gates, recurrent_n, delta, recurrent_delta};
    backward(cell, {steps, batch, hidden, reverse != 0}, w, grad_h, recurrent_delta, dh, threads);
}

// -> h.
void dpcore_rnn_forward(const float* z, const float* w, float* h, int64_t relu, int64_t steps, int64_t batch, int64_t hidden,
                        int64_t reverse, int64_t threads) {
    const Rnn cell{hidden, relu != 0, z, h, nullptr};
    forward(cell, {steps, batch, hidden, reverse != 0}, w, h, threads);
}

// grad_h [T, B, H] -> delta [T, B, H], dh [B, H].
void dpcore_rnn_backward(const float* h, const float* w, const float* grad_h, float* delta, float* dh, int64_t relu,
                         int64_t steps, int64_t batch, int64_t hidden, int64_t reverse, int64_t threads) {
    const Rnn cell{hidden, relu != 0, nullptr, h, delta};
    backward(cell, {steps, batch, hidden, reverse != 0}, w, grad_h, delta, dh, threads);
}
}
