// Cross-entropy of rows of bf16 logits on a CPU, for processors with bf16 instructions (AVX512-BF16). The rows can be
// overwritten with their gradient.
//
// n rows, V vocabulary, C >= V columns, of which those beyond V are no tokens and get a gradient of 0. z = cap · tanh(x / cap),
// or z = x without a cap; the nats of a row are ln Σ e^z - z[target]. Its exponentials, and the derivatives of its soft cap,
// stay in the processor's cache until their sum is known.

#include <cmath>
#include <cstdint>

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr float LOG2_E = 1.44269504f;
using BF16 = uint16_t;

float number(BF16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

__m512 load(const BF16* x, __mmask16 lanes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x)), 16));
}

void store(BF16* place, __mmask16 lanes, __m512 x) {
    _mm256_mask_storeu_epi16(place, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

// The lanes of the 16 columns from `column` on that are columns of the row.
__mmask16 lanes_at(int64_t column, int64_t n_vocab) {
    return n_vocab - column >= LANES ? __mmask16(0xffff) : __mmask16((1u << (n_vocab - column)) - 1);
}

// 2^x, accurate to the last places of fp32: the whole part goes into the exponent, the series of 2^r serves the rest r.
__m512 power_of_2(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), r = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.54035304e-4f);
    for (float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

// tanh(x / cap) = 1 - 2 / (1 + e^(2x / cap)), with an error of 1e-7. to_power: 2 log2(e) / cap.
__m512 capped(__m512 x, float to_power) {
    const __m512 limit = _mm512_set1_ps(64), one = _mm512_set1_ps(1);  // beyond the limit the result is 1
    const __m512 power = power_of_2(_mm512_min_ps(limit, _mm512_mul_ps(x, _mm512_set1_ps(to_power))));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(one, power)));
}

float largest_of(const BF16* row, int64_t n_vocab) {
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 largest = none;
    for (int64_t v = 0; v < n_vocab; v += LANES) {
        const __mmask16 lanes = lanes_at(v, n_vocab);
        largest = _mm512_mask_max_ps(largest, lanes, largest, load(row + v, lanes));
    }
    return _mm512_reduce_max_ps(largest);
}

// The nats of one row, which becomes its gradient if `gradients`. powers, slopes: room for V numbers, rounded up to whole
// vectors: e^(z - largest z), and with a cap dz/dx.
template <bool CAPPED>
float of_row(BF16* row, int64_t target, int64_t n_vocab, float cap, bool gradients, float* powers, float* slopes) {
    const auto z_of = [cap](float x) { return CAPPED ? cap * std::tanh(x / cap) : x; };
    const float largest = z_of(largest_of(row, n_vocab)), at_target = z_of(number(row[target]));
    const __m512 one = _mm512_set1_ps(1), scale = _mm512_set1_ps(CAPPED ? cap * LOG2_E : LOG2_E);
    const __m512 shift = _mm512_set1_ps(-largest * LOG2_E);
    const float to_power = CAPPED ? 2 * LOG2_E / cap : 0;
    __m512 sums = _mm512_setzero_ps();
    for (int64_t v = 0; v < n_vocab; v += LANES) {
        const __mmask16 lanes = lanes_at(v, n_vocab);
        __m512 x = load(row + v, lanes);
        if (CAPPED) {
            x = capped(x, to_power);
            _mm512_storeu_ps(slopes + v, _mm512_fnmadd_ps(x, x, one));
        }
        const __m512 power = power_of_2(_mm512_fmadd_ps(x, scale, shift));
        _mm512_storeu_ps(powers + v, power);
        sums = _mm512_mask_add_ps(sums, lanes, sums, power);
    }
    const float sum = _mm512_reduce_add_ps(sums);
    if (gradients) {
        const __m512 inverse = _mm512_set1_ps(1 / sum);
        powers[target] -= sum;  // the softmax minus 1
        for (int64_t v = 0; v < n_vocab; v += LANES) {
            __m512 d = _mm512_mul_ps(_mm512_loadu_ps(powers + v), inverse);
            if (CAPPED) d = _mm512_mul_ps(d, _mm512_loadu_ps(slopes + v));
            store(row + v, lanes_at(v, n_vocab), d);
        }
    }
    return std::log(sum) + largest - at_target;
}

template <bool CAPPED>
void of_rows(
    BF16* logits, const int64_t* targets, float* nats, int64_t n_row, int64_t n_column, int64_t n_vocab, int64_t ignored,
    float cap, bool gradients) {
#pragma omp parallel
    {
        const int64_t room = (n_vocab + LANES - 1) / LANES * LANES;
        std::vector<float> powers(room), slopes(CAPPED ? room : 0);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n_row; ++i) {
            BF16* row = logits + i * n_column;
            const bool counts = targets[i] != ignored;
            nats[i] = counts ? of_row<CAPPED>(row, targets[i], n_vocab, cap, gradients, powers.data(), slopes.data()) : 0;
            const int64_t kept = counts ? n_vocab : 0;
            if (gradients) std::memset(row + kept, 0, (n_column - kept) * sizeof(BF16));
        }
    }
}

}  // namespace

extern "C" int has_bf16() { return 1; }

// logits (n, C) in rows, targets (n), nats (n). cap: 0 for none. Rows whose target is `ignored` have no nats and no gradient.
extern "C" void cross_entropy(
    BF16* logits, const int64_t* targets, float* nats, int64_t n_row, int64_t n_column, int64_t n_vocab, int64_t ignored,
    float cap, int64_t gradients) {
    const auto rows = cap > 0 ? of_rows<true> : of_rows<false>;
    rows(logits, targets, nats, n_row, n_column, n_vocab, ignored, cap, gradients);
}

#else
extern "C" int has_bf16() { return 0; }
#endif
