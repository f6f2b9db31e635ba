// Decoding on a CPU: the few operations of one new token, each of which reads its weights or its cache once.
//
// n_row rows of n_in numbers become rows of n_out. Activations are fp32 or bf16 (the bits of the upper half of an fp32), and
// all sums are fp32 or exact integers. Plain C++ with GCC's vector types: the compiler makes of them what the processor has.
// The readable twins are torch's linear and rms_norm, `Int8Linear.readable`, and MultiHeadAttention.forward.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Bits = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

struct BF16 {
    uint16_t bits;
};

float number(float x) { return x; }
float number(BF16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void store(float* place, float x) { *place = x; }
void store(BF16* place, float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    place->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

Floats vector(const float* x) {
    Floats v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
Floats vector(const BF16* x) {
    Halves h;
    std::memcpy(&h, x, sizeof h);
    return Floats(__builtin_convertvector(h, Bits) << 16);
}

float sum(Floats v) {
    float total = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) total += v[lane];
    return total;
}

// Four sums side by side: one alone would wait for each addition to end.
template <typename W>
float dot(const W* w, const float* x, int64_t n) {
    Floats a{}, b{}, c{}, d{};
    int64_t k = 0;
    for (; k + 4 * LANES <= n; k += 4 * LANES) {
        a += vector(w + k) * vector(x + k);
        b += vector(w + k + LANES) * vector(x + k + LANES);
        c += vector(w + k + 2 * LANES) * vector(x + k + 2 * LANES);
        d += vector(w + k + 3 * LANES) * vector(x + k + 3 * LANES);
    }
    for (; k + LANES <= n; k += LANES) a += vector(w + k) * vector(x + k);
    float total = sum((a + b) + (c + d));
    for (; k < n; ++k) total += number(w[k]) * x[k];
    return total;
}

template <typename T>
std::vector<float> in_fp32(const T* x, int64_t n) {
    std::vector<float> copy(n);
    for (int64_t k = 0; k < n; ++k) copy[k] = number(x[k]);
    return copy;
}

template <typename W, typename T>
void linear(const W* weight, const T* bias, const T* x, T* y, int64_t n_row, int64_t n_in, int64_t n_out) {
    const std::vector<float> rows = in_fp32(x, n_row * n_in);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < n_out; ++n)
        for (int64_t m = 0; m < n_row; ++m) {
            float value = dot(weight + n * n_in, rows.data() + m * n_in, n_in);
            store(y + m * n_out + n, bias ? value + number(bias[n]) : value);
        }
}

// A row as 16-bit integers u - 32768 times its step, u in two bytes: products with int8 weights are then sums of integers.
struct Bytes {
    std::vector<uint8_t> high, low;
    float step;
};

template <typename T>
Bytes in_bytes(const T* x, int64_t n) {
    Bytes bytes{std::vector<uint8_t>(n), std::vector<uint8_t>(n), 0};
    float largest = 0;
    for (int64_t k = 0; k < n; ++k) largest = std::max(largest, std::fabs(number(x[k])));
    if (!(largest > 0) || !std::isfinite(largest)) bytes.step = largest > 0 ? NAN : 0;  // no weight makes anything of these
    else bytes.step = largest / 32767;
    for (int64_t k = 0; k < n; ++k) {
        if (number(x[k]) != number(x[k])) bytes.step = NAN;
        float in_steps = bytes.step > 0 ? number(x[k]) / bytes.step : 0;
        int32_t u = 32768 + int32_t(std::lrint(std::min(32767.0f, std::max(-32767.0f, in_steps))));
        bytes.high[k] = uint8_t(u >> 8);
        bytes.low[k] = uint8_t(u & 255);
    }
    return bytes;
}

template <typename T>
void linear_int8(
    const int8_t* weight, const float* scale, const int32_t* sums, const T* bias, const T* x, T* y, int64_t n_row,
    int64_t n_in, int64_t n_out) {
    std::vector<Bytes> rows;
    for (int64_t m = 0; m < n_row; ++m) rows.push_back(in_bytes(x + m * n_in, n_in));
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < n_out; ++n)
        for (int64_t m = 0; m < n_row; ++m) {
            const int8_t* w = weight + n * n_in;
            const uint8_t *high = rows[m].high.data(), *low = rows[m].low.data();
            int32_t of_high = 0, of_low = 0;
            for (int64_t k = 0; k < n_in; ++k) {
                of_high += int32_t(w[k]) * high[k];
                of_low += int32_t(w[k]) * low[k];
            }
            int64_t total = 256 * int64_t(of_high) + of_low - 32768 * int64_t(sums[n]);
            float value = float(total) * scale[n] * rows[m].step;
            store(y + m * n_out + n, bias ? value + number(bias[n]) : value);
        }
}

template <typename T>
void rms_norm(const T* x, const float* weight, T* y, int64_t n_row, int64_t n, float epsilon) {
    for (int64_t m = 0; m < n_row; ++m) {
        const std::vector<float> row = in_fp32(x + m * n, n);
        float factor = 1 / std::sqrt(dot(row.data(), row.data(), n) / n + epsilon);
        for (int64_t k = 0; k < n; ++k) store(y + m * n + k, row[k] * factor * weight[k]);
    }
}

// A head's query or key (D), RMS-normalised where epsilon is not negative, scaled, and turned by the position's angles.
template <typename T>
std::vector<float> placed(const T* x, int64_t d, float epsilon, float scale, const float* turn) {
    std::vector<float> head = in_fp32(x, d);
    float factor = epsilon < 0 ? scale : scale / std::sqrt(dot(head.data(), head.data(), d) / d + epsilon);
    for (int64_t k = 0; k < d; ++k) head[k] *= factor;
    if (turn) {
        const std::vector<float> before = head;
        for (int64_t k = 0; k < d; ++k) head[k] = before[k] * turn[k] + before[(k + d / 2) % d] * turn[d + k];
    }
    return head;
}

// One new token of each of B texts of one length: qkv (B, (H + 2G) D) and the cache (B, G, room, D), of which `length` are
// filled. The new key and value go into the cache; out (B, H D).
template <typename T>
void attend(
    const T* qkv, T* keys, T* values, const float* turn, T* out, int64_t n_batch, int64_t n_head, int64_t n_kv_head,
    int64_t d, int64_t n_room, int64_t length, float epsilon, float scale) {
    const int64_t shared = n_head / n_kv_head, width = (n_head + 2 * n_kv_head) * d;
#pragma omp parallel for schedule(static)
    for (int64_t each = 0; each < n_batch * n_kv_head; ++each) {
        const int64_t b = each / n_kv_head, g = each % n_kv_head;
        const T* new_key = qkv + b * width + (n_head + g) * d;
        T *key = keys + each * n_room * d, *value = values + each * n_room * d;
        const std::vector<float> own = placed(new_key, d, epsilon, 1, turn);
        for (int64_t k = 0; k < d; ++k) store(key + length * d + k, own[k]);
        std::memcpy(value + length * d, new_key + n_kv_head * d, d * sizeof(T));
        std::vector<float> weights(length + 1), retrieved(d);
        for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
            const std::vector<float> query = placed(qkv + b * width + h * d, d, epsilon, scale, turn);
            float largest = -INFINITY, total = 0;
            for (int64_t s = 0; s <= length; ++s) {
                weights[s] = dot(key + s * d, query.data(), d);
                largest = std::max(largest, weights[s]);
            }
            for (int64_t s = 0; s <= length; ++s) total += weights[s] = std::exp(weights[s] - largest);
            std::fill(retrieved.begin(), retrieved.end(), 0.0f);
            for (int64_t s = 0; s <= length; ++s)
                for (int64_t k = 0; k < d; ++k) retrieved[k] += weights[s] * number(value[s * d + k]);
            for (int64_t k = 0; k < d; ++k) store(out + (b * n_head + h) * d + k, retrieved[k] / total);
        }
    }
}

}  // namespace

#define FOR_TYPE(T, NAME)                                                                                                  \
    extern "C" void linear_##NAME(                                                                                         \
        const T* weight, const T* bias, const T* x, T* y, int64_t n_row, int64_t n_in, int64_t n_out) {                    \
        linear(weight, bias, x, y, n_row, n_in, n_out);                                                                    \
    }                                                                                                                      \
    extern "C" void linear_int8_##NAME(                                                                                    \
        const int8_t* weight, const float* scale, const int32_t* sums, const T* bias, const T* x, T* y, int64_t n_row,     \
        int64_t n_in, int64_t n_out) {                                                                                     \
        linear_int8(weight, scale, sums, bias, x, y, n_row, n_in, n_out);                                                  \
    }                                                                                                                      \
    extern "C" void rms_norm_##NAME(const T* x, const float* weight, T* y, int64_t n_row, int64_t n, float epsilon) {      \
        rms_norm(x, weight, y, n_row, n, epsilon);                                                                         \
    }                                                                                                                      \
    extern "C" void attend_##NAME(                                                                                         \
        const T* qkv, T* keys, T* values, const float* turn, T* out, int64_t n_batch, int64_t n_head, int64_t n_kv_head,   \
        int64_t d, int64_t n_room, int64_t length, float epsilon, float scale) {                                           \
        attend(qkv, keys, values, turn, out, n_batch, n_head, n_kv_head, d, n_room, length, epsilon, scale);               \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BF16, bf16)
