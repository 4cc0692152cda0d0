// exp of vectors.
#pragma once

#include "vectors.h"

// exp(x) = 2^k exp(r), |r| <= ln 2 / 2, by Taylor's series to r^7: relative error below 1e-8 before rounding.
// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits. NaN stays NaN.
static inline V exponential(V x) {
    x = x > 88.0f ? all(88.0f) : x;
    x = x < -87.0f ? all(-87.0f) : x;
    const V shift = all(12582912.0f);
    V n = x * 1.44269504f + shift;
    I k = (I)n - (I)shift;
    n = n - shift;
    V r = x - n * 0.693359375f;  // ln 2 in two parts: the first has few bits, so that its product with n is exact
    r = r + n * 2.12194440e-4f;
    V p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (V)((k + 127) << 23);
}
