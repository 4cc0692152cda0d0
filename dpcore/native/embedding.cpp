// Tokens of an example counted, and rows added to the table's gradient by token: per example one pass over its ids.

#include "vectors.h"

// ids [B, T], each in [0, rows) -> by example its different tokens and how often it holds each, in order of appearance:
// tokens and counts [starts[B]], starts [B + 1]. Returns through ``squares`` [B] the sums of the squared counts.
// ``skipped``: a token that does not count, or -1.
extern "C" void dpcore_count_tokens(const int64_t* ids, int32_t* tokens, float* counts, int32_t* starts, float* squares,
                                    int64_t batch, int64_t length, int64_t rows, int64_t skipped) {
    // Where in the output a token of this example stands, plus one; anything up to the example's first place is another's.
    Zeros<int32_t> place(rows);
    int32_t next = 0;
    for (int64_t b = 0; b < batch; ++b) {
        const int32_t first = starts[b] = next;
        for (int64_t t = 0; t < length; ++t) {
            const int64_t id = ids[b * length + t];
            if (id == skipped) continue;
            const int32_t at = place[id] - 1;
            if (at >= first) {
                counts[at] += 1.0f;
            } else {
                tokens[next] = int32_t(id);
                counts[next++] = 1.0f;
                place[id] = next;
            }
        }
        double sum = 0.0;
        for (int32_t n = first; n < next; ++n) sum += double(counts[n]) * double(counts[n]);
        squares[b] = float(sum);
    }
    starts[batch] = next;
}

// out[tokens[n], :] += counts[n] * vectors[b, :] for the tokens n of every example b; out [rows, d], vectors [B, d].
// A thread takes a range of rows, so that the order of the additions to a row does not depend on how many there are.
extern "C" void dpcore_add_by_token(const int32_t* tokens, const float* counts, const int32_t* starts, const float* vectors,
                                    float* out, int64_t batch, int64_t rows, int64_t d, int64_t threads) {
    by_threads(rows, 1024, threads, [&](int64_t low, int64_t high) {
        const bool all_rows = low == 0 && high == rows;
        for (int64_t b = 0; b < batch; ++b) {
            const float* vector = vectors + b * d;
            for (int32_t n = starts[b]; n < starts[b + 1]; ++n) {
                if (!all_rows && (tokens[n] < low || tokens[n] >= high)) continue;
                float* row = out + int64_t(tokens[n]) * d;
                for (int64_t j = 0; j < d; j += W)
                    store(row + j, load(row + j, d - j) + counts[n] * load(vector + j, d - j), d - j);
            }
        }
    });
}
