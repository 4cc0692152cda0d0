// The cross-entropy of rows of float32 logits with one class each, and its gradient at the logits: torch writes the logarithms
// of all probabilities and a gradient at those to memory, and reads both again. Here a row is read while it is in the cache.

#include <atomic>
#include <cmath>
#include <limits>

#include "exponential.h"
#include "vectors.h"

// exp of what is at most 0, or NaN; 0 where it would be less than float32's normal numbers.
static inline V falling_exponential(V x) { return x < -87.0f ? V{} : exponential(x); }

// The last n < W floats of a row, and ``rest`` behind them.
static inline V part(const float* p, int64_t n, float rest) {
    V v = all(rest);
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}

static float largest(const float* z, int64_t classes) {
    const float nothing = -std::numeric_limits<float>::infinity();
    V top[4] = {all(nothing), all(nothing), all(nothing), all(nothing)};
    int64_t j = 0;
    for (; j + 4 * W <= classes; j += 4 * W)
        for (int k = 0; k < 4; ++k) {
            const V x = load(z + j + k * W, W);
            top[k] = x > top[k] ? x : top[k];
        }
    for (; j < classes; j += W) {
        const V x = classes - j >= W ? load(z + j, W) : part(z + j, classes - j, nothing);
        top[0] = x > top[0] ? x : top[0];
    }
    float found = nothing;
    for (int k = 0; k < 4; ++k)
        for (int lane = 0; lane < W; ++lane) found = std::max(found, top[k][lane]);
    return found;
}

constexpr int AT_ONCE = 64;  // vectors that are added up in float32, before their sum goes to float64

static double sum_of_exponentials(const float* z, int64_t classes, float top) {
    const V shift = all(top);
    double total = 0.0;
    for (int64_t first = 0; first < classes; first += AT_ONCE * W) {
        const int64_t last = std::min<int64_t>(classes, first + AT_ONCE * W);
        V sums[2] = {};
        int64_t j = first;
        for (; j + 2 * W <= last; j += 2 * W)
            for (int k = 0; k < 2; ++k) sums[k] += falling_exponential(load(z + j + k * W, W) - shift);
        for (; j < last; j += W) {
            const V x = last - j >= W ? load(z + j, W) : part(z + j, last - j, -std::numeric_limits<float>::infinity());
            sums[0] += falling_exponential(x - shift);
        }
        for (int lane = 0; lane < W; ++lane) total += double(sums[0][lane]) + double(sums[1][lane]);
    }
    return total;
}

// Rows z[(r / inner) * outer_step + (r % inner) * inner_step + class] with labels [rows] in [0, classes) -> losses [rows], 0 where
// the label is ``ignored``, and what the gradient needs: shifts [2, rows], the largest logit and the logarithm of the sum of
// exp(logit - largest).
extern "C" void dpcore_cross_entropy_forward(const float* z, const int64_t* labels, float* losses, float* shifts, int64_t rows,
                                             int64_t inner, int64_t classes, int64_t outer_step, int64_t inner_step,
                                             int64_t ignored, int64_t threads) {
    by_threads(rows, worth_a_thread(30.0 * classes), threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            losses[r] = shifts[r] = shifts[rows + r] = 0.0f;
            if (labels[r] == ignored) continue;
            const float* row = z + (r / inner) * outer_step + (r % inner) * inner_step;
            const float top = largest(row, classes);
            const double log_sum = std::log(sum_of_exponentials(row, classes, top));
            shifts[r] = top;
            shifts[rows + r] = float(log_sum);
            losses[r] = float(double(top) - double(row[labels[r]]) + log_sum);
        }
    });
}

// out [rows, classes] = grad[r] (probability - 1 where the class is the label); 0 where the label is ``ignored``. Returns whether
// the logits or labels are no longer those of the forward pass: probabilities that do not add up to 1, or a label beyond them.
extern "C" int dpcore_cross_entropy_backward(const float* z, const int64_t* labels, const float* grad, const float* shifts,
                                             float* out, int64_t rows, int64_t inner, int64_t classes, int64_t outer_step,
                                             int64_t inner_step, int64_t ignored, int64_t threads) {
    std::atomic<int> changed{0};
    by_threads(rows, worth_a_thread(30.0 * classes), threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            float* to = out + r * classes;
            if (labels[r] == ignored) {
                std::memset(to, 0, classes * sizeof(float));
                continue;
            }
            const float* row = z + (r / inner) * outer_step + (r % inner) * inner_step;
            const V top = all(shifts[r]), log_sum = all(shifts[rows + r]), scale = all(grad[r]);
            double total = 0.0;
            for (int64_t from = 0; from < classes; from += AT_ONCE * W) {
                const int64_t end = std::min<int64_t>(classes, from + AT_ONCE * W);
                V sum{};
                for (int64_t j = from; j < end; j += W) {
                    const int64_t n = end - j;
                    const V x = n >= W ? load(row + j, W) : part(row + j, n, -std::numeric_limits<float>::infinity());
                    const V probability = falling_exponential(x - top - log_sum);
                    sum += probability;
                    store(to + j, scale * probability, n);
                }
                for (int lane = 0; lane < W; ++lane) total += sum[lane];
            }
            const bool finite = shifts[rows + r] == shifts[rows + r];  // NaN where the logits had no probabilities
            if (uint64_t(labels[r]) >= uint64_t(classes) || (finite && !(std::fabs(total - 1.0) < 0.01)))
                changed = 1;
            else
                to[labels[r]] -= grad[r];
        }
    });
    return changed;
}
