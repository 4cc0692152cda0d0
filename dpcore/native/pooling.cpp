// The largest number of every window of float32 planes [H, W], and the way back. torch takes some 13 ns for an output where
// planes are dense, and keeps eight bytes for it; here a row of outputs is compared at once, and a byte says where it came from.

#include <limits>

#include "vectors.h"

typedef uint8_t Bytes __attribute__((vector_size(W)));

// x [planes, H, W] -> out [planes, rows, columns], codes of that shape: row in the window * kernel_w + column in it. Equal numbers
// and NaN as in torch: the first of equals, the last NaN.
extern "C" void dpcore_max_pool_forward(const float* x, float* out, uint8_t* codes, int64_t height, int64_t width, int64_t rows,
                                        int64_t columns, int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w,
                                        int64_t padding_h, int64_t padding_w, int64_t planes, int64_t threads) {
    const float nothing = -std::numeric_limits<float>::infinity();
    // A plane's row apart by column % stride_w, so that a window's numbers of neighbouring outputs are neighbours; with padding.
    const int64_t part = columns + kernel_w / stride_w + W, row = part * stride_w;
    const double work = double(height * width) + 0.3 * double(rows * columns * kernel_h * kernel_w);
    Zeros<int32_t> begin(columns + W);  // the first column of each window that is no padding
    for (int64_t o = 0; o < columns; ++o) begin[o] = int32_t(std::max<int64_t>(0, padding_w - o * stride_w));
    Zeros<int64_t> offset(kernel_w);  // of a window's columns in such a row
    for (int64_t b = 0; b < kernel_w; ++b) offset[b] = b % stride_w * part + b / stride_w;
    by_threads(planes, worth_a_thread(work), threads, [&](int64_t first, int64_t last) {
        Zeros<float> plane(height * row);
        std::fill(&plane[0], &plane[0] + height * row, nothing);
        for (int64_t p = first; p < last; ++p) {
            for (int64_t i = 0; i < height; ++i)
                for (int64_t phase = 0; phase < stride_w; ++phase) {
                    const int64_t skipped = (padding_w - phase + stride_w - 1) / stride_w;  // places of padding
                    const float* src = x + (p * height + i) * width + skipped * stride_w + phase - padding_w;
                    float* to = &plane[i * row + phase * part + skipped];
                    const int64_t there = (width + padding_w - phase - skipped * stride_w + stride_w - 1) / stride_w;
                    const int64_t count = std::min(part - skipped, there);
                    if (stride_w == 1)
                        std::memcpy(to, src, count * sizeof(float));
                    else
                        for (int64_t k = 0; k < count; ++k) to[k] = src[k * stride_w];
                }
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t top = i * stride_h - padding_h;
                const int64_t low = std::max<int64_t>(0, -top), high = std::min(kernel_h, height - top);
                for (int64_t o = 0; o < columns; o += W) {
                    V best = all(nothing);
                    I code;
                    std::memcpy(&code, &begin[o], sizeof(I));
                    code += int32_t(low * kernel_w);
                    for (int64_t a = low; a < high; ++a)
                        for (int64_t b = 0; b < kernel_w; ++b) {
                            const V v = load(&plane[(top + a) * row + offset[b] + o], W);
                            const I takes = (v > best) | (v != v);
                            best = takes ? v : best;
                            code = takes ? I{} + int32_t(a * kernel_w + b) : code;
                        }
                    const int64_t at = (p * rows + i) * columns + o, count = std::min<int64_t>(W, columns - o);
                    store(out + at, best, count);
                    const Bytes narrow = __builtin_convertvector(code, Bytes);
                    std::memcpy(codes + at, &narrow, count);
                }
            }
        }
    });
}

// found [planes, H, W], all zeros, += grad [planes, rows, columns] where the codes say, in torch's order.
extern "C" void dpcore_max_pool_backward(const float* grad, const uint8_t* codes, float* found, int64_t height, int64_t width, int64_t rows, int64_t columns,
                                         int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w,
                                         int64_t padding_h, int64_t padding_w, int64_t planes, int64_t threads) {
    Zeros<int64_t> offset(kernel_h * kernel_w);
    for (int64_t a = 0; a < kernel_h; ++a)
        for (int64_t b = 0; b < kernel_w; ++b) offset[a * kernel_w + b] = a * width + b;
    by_threads(planes, worth_a_thread(4.0 * double(rows * columns)), threads, [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; ++p)
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t row = (p * rows + i) * columns;
                float* at = found + (p * height + i * stride_h - padding_h) * width - padding_w;
                for (int64_t o = 0; o < columns; ++o) at[o * stride_w + offset[codes[row + o]]] += grad[row + o];
            }
    });
}

// The same where channels lie beside each other, x [batch, H, W, channels]: here a window's numbers of neighbouring channels are
// compared at once.
extern "C" void dpcore_max_pool_forward_last(const float* x, float* out, uint8_t* codes, int64_t height, int64_t width, int64_t rows,
                                             int64_t columns, int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w,
                                             int64_t padding_h, int64_t padding_w, int64_t batch, int64_t channels, int64_t threads) {
    by_threads(batch * rows, worth_a_thread(0.3 * double(columns * channels * kernel_h * kernel_w)), threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const int64_t top = r % rows * stride_h - padding_h;
            const int64_t low = std::max<int64_t>(0, -top), high = std::min(kernel_h, height - top);
            const float* plane = x + r / rows * height * width * channels;
            for (int64_t o = 0; o < columns; ++o) {
                const int64_t left = o * stride_w - padding_w, at = (r * columns + o) * channels;
                const int64_t begin = std::max<int64_t>(0, -left), end = std::min(kernel_w, width - left);
                for (int64_t c = 0; c < channels; c += W) {
                    V best = all(-std::numeric_limits<float>::infinity());
                    I code = I{} + int32_t(low * kernel_w + begin);
                    for (int64_t a = low; a < high; ++a)
                        for (int64_t b = begin; b < end; ++b) {
                            const V v = load(plane + ((top + a) * width + left + b) * channels + c, channels - c);
                            const I takes = (v > best) | (v != v);
                            best = takes ? v : best;
                            code = takes ? I{} + int32_t(a * kernel_w + b) : code;
                        }
                    store(out + at + c, best, channels - c);
                    const Bytes narrow = __builtin_convertvector(code, Bytes);
                    std::memcpy(codes + at + c, &narrow, std::min<int64_t>(W, channels - c));
                }
            }
        }
    });
}

extern "C" void dpcore_max_pool_backward_last(const float* grad, const uint8_t* codes, float* found, int64_t height, int64_t width,
                                              int64_t rows, int64_t columns, int64_t kernel_h, int64_t kernel_w, int64_t stride_h,
                                              int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t batch, int64_t channels,
                                              int64_t threads) {
    const double work = 0.3 * double(rows * columns * channels * kernel_h * kernel_w);
    by_threads(batch, worth_a_thread(work), threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first * rows; r < last * rows; ++r) {
            const int64_t top = r % rows * stride_h - padding_h;
            const int64_t low = std::max<int64_t>(0, -top), high = std::min(kernel_h, height - top);
            float* plane = found + r / rows * height * width * channels;
            for (int64_t o = 0; o < columns; ++o) {
                const int64_t left = o * stride_w - padding_w, at = (r * columns + o) * channels;
                const int64_t begin = std::max<int64_t>(0, -left), end = std::min(kernel_w, width - left);
                for (int64_t c = 0; c < channels; c += W) {
                    Bytes narrow{};
                    std::memcpy(&narrow, codes + at + c, std::min<int64_t>(W, channels - c));
                    const I code = __builtin_convertvector(narrow, I);
                    const V of = load(grad + at + c, channels - c);
                    for (int64_t a = low; a < high; ++a)
                        for (int64_t b = begin; b < end; ++b) {
                            float* to = plane + ((top + a) * width + left + b) * channels + c;
                            const V before = load(to, channels - c);
                            store(to, code == int32_t(a * kernel_w + b) ? before + of : before, channels - c);
                        }
                }
            }
        }
    });
}
