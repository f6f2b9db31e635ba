// Causal attention in fp32 on a CPU, forward and backward, by GCC's vectors of any width. attend.cpp is its twin in bf16: the
// names, the blocks and the formulas are explained there.
// Rows of queries, values and gradients are read and written where they lie. Keys, and in the backward pass values, are first
// turned, so that a product reads LANES of them at once. A block of keys after all of a block's queries is left out. The last
// arguments, which say how attend.cpp modifies scores, are not used here.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t QUERIES = 64, KEYS = 64, COLUMNS = 16;
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // ROWS x COLUMNS sums fit in registers, and are enough to keep them busy
using Floats = float __attribute__((vector_size(4 * LANES)));
using Whole = int32_t __attribute__((vector_size(4 * LANES)));
using Anywhere = float __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // at any address

Floats load(const float* x) { return *(const Anywhere*)x; }
void store(float* place, Floats x) { *(Anywhere*)place = x; }

// e^x for x <= 0, as 2^n e^r with |r| <= ln(2) / 2 and a polynomial of degree 6. NaN stays NaN. The error is that of x rounded.
Floats exponential(Floats x) {
    const Floats t = x < -87.0f ? Floats{} - 125.5f : x * 1.44269504f;
    const Whole n = __builtin_convertvector(t - 0.5f, Whole);
    const Floats r = (t - __builtin_convertvector(n, Floats)) * 0.693147181f;
    Floats y = Floats{} + 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + c;
    return (Floats)((Whole)y + (n << 23));
}

// The left matrix of a product: rows lie `step` numbers apart, the numbers of a row `k_step`.
struct Left {
    const float* start;
    int64_t step, k_step = 1;
    Left from(int64_t row) const { return {start + row * step, step, k_step}; }
};

// COLUMNS columns of `product`, for M rows.
template <int M, bool ADD>
void tile(Left a, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t depth) {
    constexpr int N = COLUMNS / LANES;
    Floats sums[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = ADD ? load(c + m * c_step + n * LANES) : Floats{};
    for (int64_t k = 0; k < depth; ++k)
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                sums[m][n] += a.start[m * a.step + k * a.k_step] * load(b + k * b_step + n * LANES);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(c + m * c_step + n * LANES, sums[m][n]);
}

// C = A B, or C += A B with ADD: A (rows, depth), B (depth, columns). columns: a multiple of COLUMNS.
template <bool ADD>
void product(Left a, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t n = 0; n < columns; n += COLUMNS) {
        int64_t m = 0;
        for (; m + ROWS <= rows; m += ROWS) tile<ROWS, ADD>(a.from(m), b + n, b_step, c + m * c_step + n, c_step, depth);
        for (; m + 2 <= rows; m += 2) tile<2, ADD>(a.from(m), b + n, b_step, c + m * c_step + n, c_step, depth);
        for (; m < rows; ++m) tile<1, ADD>(a.from(m), b + n, b_step, c + m * c_step + n, c_step, depth);
    }
}

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
int64_t room_for(int64_t n_token) { return up_to(n_token, KEYS) + COLUMNS; }  // more than needed, as in attend.cpp

// x, with 0 in place of the keys from position `column` on that lie after the position `query`.
Floats visible(Floats x, int64_t column, int64_t query) {
    for (int64_t i = 0; i < LANES; ++i)
        if (column + i > query) x[i] = 0;
    return x;
}

// x (n, d), turned to (d, capacity); zeros from column n on.
void transpose(const float* x, int64_t step, int64_t n, int64_t d, int64_t capacity, float* turned) {
    for (int64_t k = 0; k < d; ++k)
        for (int64_t row = 0; row < capacity; ++row) turned[k * capacity + row] = row < n ? x[row * step + k] : 0;
}

}  // namespace

extern "C" void attend_forward(
    const float* q, const float* k, const float* v, float* out, float* lse, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_kv_head, int64_t n_token, int64_t d, float, const float*, const float*) {
    const int64_t shared = n_head / n_kv_head, capacity = room_for(n_token);
    const int64_t *sq = steps, *sk = steps + 3, *sv = steps + 6, *so = steps + 9;
#pragma omp parallel
    {
        std::vector<float> keys(capacity * d), scores(QUERIES * capacity);
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < n_batch * n_kv_head; ++each) {
            const int64_t b = each / n_kv_head, g = each % n_kv_head;
            transpose(k + b * sk[0] + g * sk[1], sk[2], n_token, d, capacity, keys.data());
            for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
                const float* qh = q + b * sq[0] + h * sq[1];
                float* oh = out + b * so[0] + h * so[1];
                for (int64_t first = 0; first < n_token; first += QUERIES) {
                    const int64_t rows = std::min(QUERIES, n_token - first), columns = up_to(first + rows, KEYS);
                    product<false>({qh + first * sq[2], sq[2]}, keys.data(), capacity, scores.data(), capacity, rows, columns, d);
                    float scale[QUERIES];
                    for (int64_t m = 0; m < rows; ++m) {
                        float* s = scores.data() + m * capacity;
                        std::fill(s + first + m + 1, s + columns, -INFINITY);
                        Floats most = load(s), total = {};
                        for (int64_t n = 0; n < columns; n += LANES) most = load(s + n) > most ? load(s + n) : most;
                        float largest = most[0];
                        for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
                        for (int64_t n = 0; n < columns; n += LANES)
                            store(s + n, exponential(load(s + n) - largest)), total += load(s + n);
                        std::fill(s + first + m + 1, s + columns, 0.0f);
                        float sum = 0;
                        for (int i = 0; i < LANES; ++i) sum += total[i];
                        scale[m] = 1 / sum;
                        lse[(b * n_head + h) * n_token + first + m] = largest + std::log(sum);
                    }
                    product<false>({scores.data(), capacity}, v + b * sv[0] + g * sv[1], sv[2], oh + first * so[2], so[2], rows, d, first + rows);
                    for (int64_t m = 0; m < rows; ++m)
                        for (int64_t c = 0; c < d; ++c) oh[(first + m) * so[2] + c] *= scale[m];
                }
            }
        }
    }
}

extern "C" void attend_backward(
    const float* q, const float* k, const float* v, const float* out, const float* lse, const float* d_out, float* d_q,
    float* d_k, float* d_v, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_kv_head, int64_t n_token,
    int64_t d, float, const float*) {
    const int64_t shared = n_head / n_kv_head, capacity = room_for(n_token);
    const int64_t *sq = steps, *sk = steps + 3, *sv = steps + 6, *so = steps + 9, *sg = steps + 12, *sdq = steps + 15,
                  *sdk = steps + 18, *sdv = steps + 21;
#pragma omp parallel
    {
        std::vector<float> keys(capacity * d), values(capacity * d), scores(QUERIES * KEYS), d_scores(QUERIES * KEYS);
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < n_batch * n_kv_head; ++each) {
            const int64_t b = each / n_kv_head, g = each % n_kv_head;
            const float* kh = k + b * sk[0] + g * sk[1];
            float *dkh = d_k + b * sdk[0] + g * sdk[1], *dvh = d_v + b * sdv[0] + g * sdv[1];
            transpose(kh, sk[2], n_token, d, capacity, keys.data());
            transpose(v + b * sv[0] + g * sv[1], sv[2], n_token, d, capacity, values.data());
            for (int64_t t = 0; t < n_token; ++t)
                for (int64_t c = 0; c < d; ++c) dkh[t * sdk[2] + c] = dvh[t * sdv[2] + c] = 0;
            for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
                const float *qh = q + b * sq[0] + h * sq[1], *oh = out + b * so[0] + h * so[1], *gh = d_out + b * sg[0] + h * sg[1];
                float* dqh = d_q + b * sdq[0] + h * sdq[1];
                for (int64_t first = 0; first < n_token; first += QUERIES) {
                    const int64_t rows = std::min(QUERIES, n_token - first);
                    float own[QUERIES];
                    for (int64_t m = 0; m < rows; ++m) {
                        own[m] = 0;
                        for (int64_t c = 0; c < d; ++c)
                            own[m] += oh[(first + m) * so[2] + c] * gh[(first + m) * sg[2] + c], dqh[(first + m) * sdq[2] + c] = 0;
                    }
                    const Left queries{qh + first * sq[2], sq[2]}, upstream{gh + first * sg[2], sg[2]};
                    for (int64_t start = 0; start < first + rows; start += KEYS) {
                        const int64_t n_key = std::min(KEYS, n_token - start);
                        product<false>(queries, keys.data() + start, capacity, scores.data(), KEYS, rows, KEYS, d);
                        product<false>(upstream, values.data() + start, capacity, d_scores.data(), KEYS, rows, KEYS, d);
                        for (int64_t m = 0; m < rows; ++m)
                            for (int64_t n = 0; n < KEYS; n += LANES) {
                                float *s = scores.data() + m * KEYS + n, *ds = d_scores.data() + m * KEYS + n;
                                Floats p = exponential(load(s) - lse[(b * n_head + h) * n_token + first + m]), dp = p * (load(ds) - own[m]);
                                if (start == first) p = visible(p, start + n, first + m), dp = visible(dp, start + n, first + m);
                                store(s, p), store(ds, dp);
                            }
                        product<true>({d_scores.data(), KEYS}, kh + start * sk[2], sk[2], dqh + first * sdq[2], sdq[2], rows, d, n_key);
                        product<true>({d_scores.data(), 1, KEYS}, queries.start, sq[2], dkh + start * sdk[2], sdk[2], n_key, d, rows);
                        product<true>({scores.data(), 1, KEYS}, upstream.start, sg[2], dvh + start * sdv[2], sdv[2], n_key, d, rows);
                    }
                }
            }
        }
    }
}
