// Norms, and clipped sums, of the gradients of many parameters in one call each: of small ones the calls would take longer
// than the work.

#include "vectors.h"

extern "C" void dpcore_contraction_clipped_sum(const float* g, const float* x, float* out, const float* factors, int64_t batch,
                                               int64_t positions, int64_t rows, int64_t columns, int64_t g_example,
                                               int64_t g_position, int64_t x_example, int64_t x_position, int64_t pitch,
                                               int64_t threads);

// The gradients of one parameter for B examples, as a row of a table of numbers and addresses. ROWS: they are g [B, width],
// ``stride`` apart. SUMS: the sums over the positions of g [B, positions, width], which are written to sums [B, width].
// OUTER: the products g x^T of g [B, width] and x [B, columns]. BAGS: g [B, width] in each of the rows that the ids
// x [B, positions], int64, name among ``columns`` of the table, as often as they do.
struct Part {
    int64_t kind, g, stride, width, positions, position_stride, sums, x, x_stride, columns, out, pitch;
    const float* g_of(int64_t b) const { return (const float*)(intptr_t)g + b * stride; }
    const float* x_of(int64_t b) const { return (const float*)(intptr_t)x + b * x_stride; }
    const int64_t* ids_of(int64_t b) const { return (const int64_t*)(intptr_t)x + b * x_stride; }
    float* sums_of(int64_t b) const { return (float*)(intptr_t)sums + b * width; }
};
constexpr int64_t SUMS = 1, OUTER = 2, BAGS = 3;  // kinds beside ROWS, which are 0

typedef double D __attribute__((vector_size(W * 4)));
typedef float Half __attribute__((vector_size(W * 2)));
constexpr int LANES = W / 2;
constexpr int64_t AT_ONCE = 64;       // positions whose sum is taken by itself
constexpr int64_t ROWS_AT_ONCE = 16;  // examples that are added in one pass over the sum
constexpr double TRUSTED_SQUARE = 1e21;  // as in numerics/rounding.py

// The square of |g x^T|; infinity where g or x is so large that a tiny clip factor would lose its digits before the other
// brings the product back: such an example is clipped in float64.
static double squared_product(double of_g, double of_x, int64_t terms) {
    const double most = TRUSTED_SQUARE / double(std::max<int64_t>(terms, 1));
    return of_g < most && of_x < most ? of_g * of_x : __builtin_inf();
}

// In float64, where the square of a float is exact.
static double squared(const float* p, int64_t n) {
    D sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; ++k) {
            Half x;
            std::memcpy(&x, p + i + k * LANES, sizeof x);
            const D y = __builtin_convertvector(x, D);
            sums[k] += y * y;
        }
    const D sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = 0.0;
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    for (; i < n; ++i) total += double(p[i]) * double(p[i]);
    return total;
}

static void sum_positions(const Part& part, int64_t b) {
    const float* g = part.g_of(b);
    float* out = part.sums_of(b);
    for (int64_t j = 0; j < part.width; j += W) {
        const int64_t left = part.width - j;
        V total{};
        for (int64_t first = 0; first < part.positions; first += AT_ONCE) {
            const int64_t last = std::min(part.positions, first + AT_ONCE);
            V sum{};
            for (int64_t t = first; t < last; ++t) sum += load(g + t * part.position_stride + j, left);
            total += sum;
        }
        store(out + j, total, left);
    }
}

// The sum over a bag's ids of how often each occurs, squared: the number of pairs of equal ones.
static double equal_pairs(const int64_t* ids, int64_t count) {
    int64_t pairs = count;
    for (int64_t i = 1; i < count; ++i)
        for (int64_t j = 0; j < i; ++j) pairs += 2 * (ids[i] == ids[j]);
    return double(pairs);
}

// Adds g at its factor to the rows that each example's ids name. Returns how many of these are no rows, to which nothing was.
static int64_t add_bags(const Part& part, const float* factors, int64_t batch) {
    int64_t wrong = 0;
    for (int64_t b = 0; b < batch; ++b) {
        if (factors[b] == 0.0f) continue;
        const float* g = part.g_of(b);
        const V factor = all(factors[b]);
        for (int64_t t = 0; t < part.positions; ++t) {
            const int64_t id = part.ids_of(b)[t];
            if (id < 0 || id >= part.columns) {
                ++wrong;
                continue;
            }
            float* row = (float*)(intptr_t)part.out + id * part.pitch;
            for (int64_t j = 0; j < part.width; j += W) {
                const int64_t left = part.width - j;
                store(row + j, load(row + j, left) + factor * load(g + j, left), left);
            }
        }
    }
    return wrong;
}

// norms_sq[b] += the squared norm of example b over all parts. Returns whether all of these are then below infinity.
extern "C" int64_t dpcore_add_norms_of_parts(const int64_t* table, float* norms_sq, int64_t count, int64_t batch,
                                             int64_t threads) {
    const Part* parts = (const Part*)table;
    double flops = 0.0;
    for (int64_t k = 0; k < count; ++k)
        flops += 2.0 * (double(parts[k].width) * std::max<int64_t>(parts[k].positions, 1) + double(parts[k].columns));
    by_threads(batch, worth_a_thread(flops), threads, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) {
            double total = 0.0;
            for (int64_t k = 0; k < count; ++k) {
                const Part& part = parts[k];
                if (part.kind == SUMS) {
                    sum_positions(part, b);
                    total += squared(part.sums_of(b), part.width);
                } else {
                    const double of_g = squared(part.g_of(b), part.width);
                    if (part.kind == OUTER)
                        total += squared_product(of_g, squared(part.x_of(b), part.columns), std::max(part.width, part.columns));
                    else if (part.kind == BAGS)
                        total += squared_product(of_g, equal_pairs(part.ids_of(b), part.positions), part.width);
                    else
                        total += of_g;
                }
            }
            // The largest float; a number that is nearly the next one would be rounded to infinity, which is looked for below.
            norms_sq[b] += total <= 3.4028234e38 ? float(total) : total != total ? __builtin_nanf("") : __builtin_inff();
        }
    });
    for (int64_t b = 0; b < batch; ++b)
        if (!(norms_sq[b] < __builtin_inff())) return 0;
    return 1;
}

// out [width] += sum over b of factors[b] rows[b], rows ``stride`` apart.
static void add_rows(const float* rows, int64_t stride, int64_t width, float* out, const float* factors, int64_t batch,
                     int64_t threads) {
    constexpr int64_t WIDE = 4 * W;
    const int64_t chunks = (width + WIDE - 1) / WIDE;
    by_threads(chunks, worth_a_thread(2.0 * WIDE * batch), threads, [&](int64_t low, int64_t high) {
        for (int64_t from = 0; from < batch; from += ROWS_AT_ONCE) {
            const int64_t to = std::min(batch, from + ROWS_AT_ONCE);
            for (int64_t j = low * WIDE; j < std::min(high * WIDE, width); j += WIDE) {
                V sums[4];
                for (int k = 0; k < 4; ++k) sums[k] = k * W < width - j ? load(out + j + k * W, width - j - k * W) : V{};
                for (int64_t b = from; b < to; ++b) {
                    if (factors[b] == 0.0f) continue;
                    const V factor = all(factors[b]);
                    const float* row = rows + b * stride + j;
                    if (width - j >= WIDE)
                        for (int k = 0; k < 4; ++k) sums[k] += factor * (V) * (const Unaligned*)(row + k * W);
                    else
                        for (int k = 0; k < 4 && k * W < width - j; ++k) sums[k] += factor * load(row + k * W, width - j - k * W);
                }
                for (int k = 0; k < 4 && k * W < width - j; ++k) store(out + j + k * W, sums[k], width - j - k * W);
            }
        }
    });
}

// Adds the clipped sum of every part to its ``out``: [width], or of OUTER [width, columns] with rows ``pitch`` apart. An
// example at a factor of 0 is left out, whatever its values. Returns how many ids are none of their table.
extern "C" int64_t dpcore_add_parts(const int64_t* table, const float* factors, int64_t count, int64_t batch, int64_t threads) {
    const Part* parts = (const Part*)table;
    int64_t wrong = 0;
    for (int64_t k = 0; k < count; ++k) {
        const Part& part = parts[k];
        float* out = (float*)(intptr_t)part.out;
        if (part.kind == OUTER)
            dpcore_contraction_clipped_sum(part.g_of(0), part.x_of(0), out, factors, batch, 1, part.width, part.columns,
                                           part.stride, 0, part.x_stride, 0, part.pitch, threads);
        else if (part.kind == BAGS)
            wrong += add_bags(part, factors, batch);
        else if (part.kind == SUMS)
            add_rows(part.sums_of(0), part.width, part.width, out, factors, batch, threads);
        else
            add_rows(part.g_of(0), part.stride, part.width, out, factors, batch, threads);
    }
    return wrong;
}

// Flat clipping by the arithmetic of torch's operators: factors = min(1, bound / norm), or 0 where a norm is no number below
// infinity, and those times ``scale``. Returns whether all norms are. (Roots are left to torch, which on some processors has
// others than the nearest ones.)
extern "C" int64_t dpcore_clip_factors(const float* norms, float* factors, float* scaled, int64_t batch, double bound, double scale) {
    int64_t below = 1;
    for (int64_t b = 0; b < batch; ++b) {
        const float factor = 1.0f / norms[b] * float(bound);
        const bool counts = norms[b] < __builtin_inff();
        factors[b] = !counts ? 0.0f : factor < 1.0f ? factor : 1.0f;
        scaled[b] = factors[b] * float(scale);
        below &= counts;
    }
    return below;
}
