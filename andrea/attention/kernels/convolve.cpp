// The short convolution over tokens (attention/multihead.py) in bf16 on a CPU, forward and backward, for processors with
// bf16 instructions (AVX512-BF16).
//
// B sequences, H heads, T tokens, D the width of a head, K mixed tokens. y_t = x_t + Σ_i taps_i x_{t-i}. Sixteen channels are
// taken through all tokens at once. Their K newest tokens stay in registers, so that each number is read once.

#include <cstdint>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int64_t LANES = 16;
using BF16 = uint16_t;

__m512 load(const BF16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

void store(BF16* place, __m512 x) { _mm256_storeu_si256((__m256i*)place, (__m256i)_mm512_cvtneps_pbh(x)); }

// Tap `index` of 16 channels whose taps (16, K) begin at `taps`.
__m512 tap(const float* taps, int64_t n_mixed, int64_t index) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i place = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(int(n_mixed))), _mm512_set1_epi32(int(index)));
    return _mm512_i32gather_ps(place, taps, 4);
}

template <int K>
void forward(const BF16* x, int64_t x_step, const float* taps, BF16* y, int64_t y_step, int64_t n_token) {
    __m512 weights[K], recent[K];  // recent[i] is x_{t-i}
    for (int i = 0; i < K; ++i) weights[i] = tap(taps, K, i), recent[i] = _mm512_setzero_ps();
    for (int64_t t = 0; t < n_token; ++t) {
        for (int i = K - 1; i > 0; --i) recent[i] = recent[i - 1];
        __m512 sum = recent[0] = load(x + t * x_step);
        for (int i = 0; i < K; ++i) sum = _mm512_fmadd_ps(weights[i], recent[i], sum);
        store(y + t * y_step, sum);
    }
}

// dx_t = dy_t + Σ_i taps_i dy_{t+i}, and d_taps_i = Σ_t x_t dy_{t+i}.
template <int K>
void backward(
    const BF16* x, int64_t x_step, const float* taps, const BF16* dy, int64_t dy_step, BF16* dx, int64_t dx_step,
    float* d_taps, int64_t n_token) {
    __m512 weights[K], sums[K], later[K];  // later[i] is dy_{t+i}
    for (int i = 0; i < K; ++i) weights[i] = tap(taps, K, i), sums[i] = later[i] = _mm512_setzero_ps();
    for (int64_t t = n_token - 1; t >= 0; --t) {
        for (int i = K - 1; i > 0; --i) later[i] = later[i - 1];
        __m512 sum = later[0] = load(dy + t * dy_step);
        const __m512 own = load(x + t * x_step);
        for (int i = 0; i < K; ++i) {
            sum = _mm512_fmadd_ps(weights[i], later[i], sum);
            sums[i] = _mm512_fmadd_ps(own, later[i], sums[i]);
        }
        store(dx + t * dx_step, sum);
    }
    for (int i = 0; i < K; ++i) {
        float lanes[LANES];
        _mm512_storeu_ps(lanes, sums[i]);
        for (int64_t lane = 0; lane < LANES; ++lane) d_taps[lane * K + i] = lanes[lane];
    }
}

template <int K>
void forward_all(
    const BF16* x, const float* taps, BF16* y, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_token,
    int64_t d) {
#pragma omp parallel for collapse(3) schedule(static)
    for (int64_t b = 0; b < n_batch; ++b)
        for (int64_t h = 0; h < n_head; ++h)
            for (int64_t k = 0; k < d; k += LANES)
                forward<K>(
                    x + b * steps[0] + h * steps[1] + k, steps[2], taps + (h * d + k) * K,
                    y + b * steps[3] + h * steps[4] + k, steps[5], n_token);
}

template <int K>
void backward_all(
    const BF16* x, const float* taps, const BF16* dy, BF16* dx, float* d_taps, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_token, int64_t d) {
#pragma omp parallel for collapse(3) schedule(static)
    for (int64_t b = 0; b < n_batch; ++b)
        for (int64_t h = 0; h < n_head; ++h)
            for (int64_t k = 0; k < d; k += LANES)
                backward<K>(
                    x + b * steps[0] + h * steps[1] + k, steps[2], taps + (h * d + k) * K,
                    dy + b * steps[3] + h * steps[4] + k, steps[5], dx + b * steps[6] + h * steps[7] + k, steps[8],
                    d_taps + ((b * n_head + h) * d + k) * K, n_token);
}

}  // namespace

#define FOR_MIXED(CALL)          \
    switch (n_mixed) {           \
        case 1: CALL(1); break;  \
        case 2: CALL(2); break;  \
        case 3: CALL(3); break;  \
        case 4: CALL(4); break;  \
        case 5: CALL(5); break;  \
        case 6: CALL(6); break;  \
        case 7: CALL(7); break;  \
        case 8: CALL(8); break;  \
    }

extern "C" int has_bf16() { return 1; }

// x, y, dy, dx: (B, H, T, D) with a last stride of 1; steps: their strides of batch, head and token. taps (H, D, K);
// d_taps (B, H, D, K): the gradient of each sequence.
extern "C" void convolve_forward(
    const BF16* x, const float* taps, BF16* y, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_token,
    int64_t d, int64_t n_mixed) {
#define CALL(K) forward_all<K>(x, taps, y, steps, n_batch, n_head, n_token, d)
    FOR_MIXED(CALL)
#undef CALL
}

extern "C" void convolve_backward(
    const BF16* x, const float* taps, const BF16* dy, BF16* dx, float* d_taps, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_token, int64_t d, int64_t n_mixed) {
#define CALL(K) backward_all<K>(x, taps, dy, dx, d_taps, steps, n_batch, n_head, n_token, d)
    FOR_MIXED(CALL)
#undef CALL
}

#else
extern "C" int has_bf16() { return 0; }
#endif
