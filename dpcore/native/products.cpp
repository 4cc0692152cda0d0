// The gradients of many weights for one example, each a product at many positions, in one call: of small ones the calls would
// take longer than the work.

#include "outer_products.h"

// A row of a table of numbers and addresses: the gradients of one weight are the sums over positions of g x^T, by example, for
// g [B, positions, rows] and x [B, positions, columns], each with its strides over examples and positions (dense in the last
// dimension). That of one example is written to ``out`` [rows, columns], and added, at a factor, to ``sum`` of the same order.
struct Product {
    int64_t g, x, positions, rows, columns, g_example, g_position, x_example, x_position, out, sum;
    int64_t size() const { return rows * columns; }
    float* written() const { return (float*)(intptr_t)out; }
};

// Writes the gradients of one example. squares [count]: their squared norms.
extern "C" void dpcore_form_products(const int64_t* table, double* squares, int64_t count, int64_t example, int64_t threads) {
    const Product* products = (const Product*)table;
    int64_t items = 0, widest = 0, longest = 0;
    double flops = 0.0;
    for (int64_t k = 0; k < count; ++k) {
        const Product& p = products[k];
        const int64_t parts = parts_of(p.rows, threads);
        items += parts;
        widest = std::max(widest, (p.rows + parts - 1) / parts);
        longest = std::max(longest, p.positions);
        flops += 2.0 * p.positions * p.size();
        if (!p.positions) std::fill(p.written(), p.written() + p.size(), 0.0f);
    }
    Zeros<double> of_items(items);
    by_threads(items, worth_a_thread(flops / double(std::max<int64_t>(items, 1))), threads, [&](int64_t first, int64_t last) {
        Copies copies(std::min(longest, POSITIONS), widest);
        for (int64_t k = 0, item = 0; k < count; ++k) {
            const Product& p = products[k];
            const int64_t parts = parts_of(p.rows, threads);
            for (int64_t part = 0; part < parts; ++part, ++item) {
                if (item < first || item >= last) continue;
                const int64_t row = part * p.rows / parts, width = (part + 1) * p.rows / parts - row;
                const float* g = (const float*)(intptr_t)p.g + example * p.g_example + row;
                const float* x = (const float*)(intptr_t)p.x + example * p.x_example;
                of_items[item] = write_product(g, p.g_position, x, p.x_position, p.positions, width, p.columns,
                                               p.written() + row * p.columns, true, copies);
            }
        }
    });
    for (int64_t k = 0, item = 0; k < count; ++k) {
        squares[k] = 0.0;
        for (const int64_t end = item + parts_of(products[k].rows, threads); item < end; ++item) squares[k] += of_items[item];
    }
}

// Adds what was written last to the sums, each at its factor [count]. At a factor of 0 nothing is added, whatever was written.
extern "C" void dpcore_add_products(const int64_t* table, const float* factors, int64_t count, int64_t threads) {
    constexpr int64_t WIDE = 4096;
    const Product* products = (const Product*)table;
    int64_t items = 0;
    for (int64_t k = 0; k < count; ++k) items += (products[k].size() + WIDE - 1) / WIDE;
    by_threads(items, worth_a_thread(2.0 * WIDE), threads, [&](int64_t first, int64_t last) {
        for (int64_t k = 0, start = 0; k < count; ++k) {
            const int64_t size = products[k].size(), chunks = (size + WIDE - 1) / WIDE;
            const int64_t low = std::max<int64_t>(first - start, 0), high = std::min(last - start, chunks);
            start += chunks;
            if (low >= high || factors[k] == 0.0f) continue;
            const float factor = factors[k], *from = products[k].written();
            float* to = (float*)(intptr_t)products[k].sum;
            for (int64_t j = low * WIDE; j < std::min(high * WIDE, size); ++j) to[j] += factor * from[j];
        }
    });
}

// Forms and adds one example's gradients after the other's, at flat clipping's factors. norms_sq [batch] holds the squared norms
// of all other gradients of an example, to which these are added; factors [batch] = min(1, bound / norm), times ``scale`` what is
// added. The arithmetic is that of torch's operators. Returns the first example whose norm is no number below infinity, of which
// nothing was added or noted; batch where there is none.
extern "C" int64_t dpcore_clip_products(const int64_t* table, double* squares, float* added, float* norms_sq, float* factors,
                                        int64_t count, int64_t batch, int64_t threads, double bound, double scale) {
    for (int64_t b = 0; b < batch; ++b) {
        dpcore_form_products(table, squares, count, b, threads);
        double sum = 0.0;
        for (int64_t k = 0; k < count; ++k) sum += squares[k];
        const float total = norms_sq[b] + float(sum);
        if (!(total < __builtin_inff())) return b;
        norms_sq[b] = total;
        factors[b] = std::min(1.0f / __builtin_sqrtf(total) * float(bound), 1.0f);
        std::fill(added, added + count, factors[b] > 0.0f ? factors[b] * float(scale) : 0.0f);
        dpcore_add_products(table, added, count, threads);
    }
    return batch;
}
