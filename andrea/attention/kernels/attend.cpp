// Causal attention in bf16 on a CPU, forward and backward, for processors that multiply pairs of bf16 (AVX512-BF16). Below it,
// the convolution over tokens.
//
// B sequences, H query heads, G key/value heads (G divides H), T queries and T keys, D the width of a head. The forward pass
// multiplies a block of QUERIES queries by all their visible keys at once. Its scores (QUERIES, T) stay in the processor's
// cache. The softmax reads them twice: first for their maximum, then for the exponentials and their sum. The backward pass
// computes the scores again (Dao 2023, arXiv 2307.08691, algorithm 2). It knows their log-sum-exp, so a block of KEYS keys at a
// time is enough.
//
// Every matrix product is C = A B or C += A B. A is stored in rows of bf16. B is packed in pairs:
// packed[k / 2][n][k % 2] = B[k][n]. One instruction multiplies one pair of A by the pairs of 16 columns of B, and adds the
// products to 16 sums in fp32. A processor with AMX does the products of 16 rows, 16 columns and 16 pairs in one instruction.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t LANES = 16, QUERIES = 64, COLUMNS = 64, KEYS = COLUMNS, ROWS = 6;
using BF16 = uint16_t;

float number(BF16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Round 16 numbers to bf16 (nearest, ties to even).
void store(BF16* place, __m512 x) { _mm256_storeu_si256((__m256i*)place, (__m256i)_mm512_cvtneps_pbh(x)); }

// x0 … x15 y0 … y15 as pairs: x0 y0 x1 y1 …
__m512i interleaved(__m512i both) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

// x0 … x15 y0 … y15, rounded to bf16.
__m512i rounded(__m512 x, __m512 y) { return (__m512i)_mm512_cvtne2ps_pbh(y, x); }

// e^x for x <= 0, accurate to the last places of fp32 (Cody and Waite's range reduction, a polynomial of degree 6).
__m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // with the arguments in this order, NaN stays NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
}

// How scores become weights (attention/modifiers.py). cap: of the scores, or 0. slopes: ALiBi's, (H), or null. sinks: the
// logits of the attention sinks, (H), or null.
struct Scoring {
    float cap;
    const float *slopes, *sinks;
};

// tanh from e^(-2|x|), and from its series near 0, where 1 - e^(-2|x|) would cancel.
__m512 tangent(__m512 x) {
    const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x), one = _mm512_set1_ps(1);
    const __m512 e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2)));
    __m512 near = _mm512_set1_ps(-1382.0f / 155925);
    for (float c : {62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f})
        near = _mm512_fmadd_ps(near, square, _mm512_set1_ps(c));
    const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __mmask16 is_near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.25f), _CMP_LT_OQ);
    const __m512 y = _mm512_mask_mul_ps(far, is_near, size, near);
    return _mm512_mask_sub_ps(y, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), y);
}

// The scores of query i with the 16 keys from position `column` on, as modified. capped: receives tanh(s / cap) of each
// score s, if there is a cap.
__m512 modified(__m512 s, const Scoring& scoring, int64_t h, int64_t i, int64_t column, __m512& capped) {
    if (scoring.cap > 0) {
        capped = tangent(_mm512_div_ps(s, _mm512_set1_ps(scoring.cap)));
        s = _mm512_mul_ps(_mm512_set1_ps(scoring.cap), capped);
    }
    if (scoring.slopes) {
        const __m512 lanes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 distance = _mm512_sub_ps(_mm512_set1_ps(float(i - column)), lanes);  // below 0 for masked keys alone
        s = _mm512_fnmadd_ps(_mm512_set1_ps(scoring.slopes[h]), distance, s);
    }
    return s;
}

// The left matrix of a product: rows lie `step` numbers apart.
struct Left {
    const BF16* start;
    int64_t step;
    Left from(int64_t row) const { return {start + row * step, step}; }
};

// C = A B, or C += A B with ADD: A (M, 2 · pairs), packed B, C (M, 16 · N), whose rows lie c_step numbers apart.
template <int M, int N, bool ADD>
void tile(Left a, const BF16* packed, int64_t b_columns, float* c, int64_t c_step, int64_t pairs) {
    __m512 sums[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = ADD ? _mm512_loadu_ps(c + m * c_step + n * LANES) : _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k) {
        __m512bh b[N];
        for (int n = 0; n < N; ++n) b[n] = (__m512bh)_mm512_loadu_si512(packed + 2 * (k * b_columns + n * LANES));
        for (int m = 0; m < M; ++m) {
            int32_t pair;
            std::memcpy(&pair, a.start + m * a.step + 2 * k, 4);
            const __m512bh same = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], same, b[n]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + m * c_step + n * LANES, sums[m][n]);
}

template <int N, bool ADD>
void strip(Left a, const BF16* packed, int64_t b_columns, float* c, int64_t c_step, int64_t pairs, int64_t rows) {
    int64_t m = 0;
    for (; m + ROWS <= rows; m += ROWS) tile<ROWS, N, ADD>(a.from(m), packed, b_columns, c + m * c_step, c_step, pairs);
    for (; m + 2 <= rows; m += 2) tile<2, N, ADD>(a.from(m), packed, b_columns, c + m * c_step, c_step, pairs);
    for (; m < rows; ++m) tile<1, N, ADD>(a.from(m), packed, b_columns, c + m * c_step, c_step, pairs);
}

#ifdef TILES

constexpr int64_t TILE = 16;  // rows of a tile, and its columns: of fp32, or of pairs of bf16

// Whether the system lets this process use tiles. It is asked once: the registers are large, and saved at each task switch.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;

// The shapes of this thread's eight tiles, all full, until the block ends. Then they are as before, because other code in
// this thread (oneDNN's) may rely on its own.
struct Tiles {
    struct alignas(64) Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    Shapes before;
    Tiles() {
        if (!has_tiles) return;
        Shapes full{};
        full.palette = 1;
        for (int i = 0; i < 8; ++i) full.row_bytes[i] = 64, full.rows[i] = TILE;
        asm volatile("sttilecfg %0" : "=m"(before));  // GCC's functions for these do not say that they read or write it all
        asm volatile("ldtilecfg %0" : : "m"(full));
    }
    ~Tiles() {
        if (has_tiles) asm volatile("ldtilecfg %0" : : "m"(before));
    }
};

// C = A B, or C += A B with ADD, for M · 16 rows and N · 16 columns. pairs: a multiple of 16.
template <int M, int N, bool ADD>
void tiles(Left a, const BF16* packed, int64_t b_columns, float* c, int64_t c_step, int64_t pairs) {
    const int64_t c_bytes = 4 * c_step, a_bytes = 2 * a.step, b_bytes = 4 * b_columns;
    float* lower = c + TILE * c_step;
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
    if (ADD) {
        _tile_loadd(0, c, c_bytes);
        if (N > 1) _tile_loadd(1, c + TILE, c_bytes);
        if (M > 1) _tile_loadd(2, lower, c_bytes);
        if (M > 1 && N > 1) _tile_loadd(3, lower + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < pairs; k += TILE) {
        const BF16 *left = a.start + 2 * k, *right = packed + 2 * k * b_columns;
        _tile_loadd(4, left, a_bytes);
        if (M > 1) _tile_loadd(5, left + TILE * a.step, a_bytes);
        _tile_loadd(6, right, b_bytes);
        if (N > 1) _tile_loadd(7, right + 2 * TILE, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (N > 1) _tile_dpbf16ps(1, 4, 7);
        if (M > 1) _tile_dpbf16ps(2, 5, 6);
        if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    if (N > 1) _tile_stored(1, c + TILE, c_bytes);
    if (M > 1) _tile_stored(2, lower, c_bytes);
    if (M > 1 && N > 1) _tile_stored(3, lower + TILE, c_bytes);
}

// The first rows of C = A B that tiles can compute, and their number.
template <bool ADD>
int64_t product_of_tiles(
    Left a, const BF16* packed, int64_t b_columns, float* c, int64_t c_step, int64_t rows, int64_t columns, int64_t pairs) {
    const int64_t whole = rows / TILE * TILE;
    for (int64_t n = 0; n < columns; n += 2 * TILE)
        for (int64_t m = 0; m < whole; m += 2 * TILE) {
            const bool tall = m + TILE < whole, wide = n + TILE < columns;
            const auto block = tall ? wide ? tiles<2, 2, ADD> : tiles<2, 1, ADD> : wide ? tiles<1, 2, ADD> : tiles<1, 1, ADD>;
            block(a.from(m), packed + 2 * n, b_columns, c + m * c_step + n, c_step, pairs);
        }
    return whole;
}

#else
constexpr bool has_tiles = false;
struct Tiles {};
#endif

// C = A B, or C += A B with ADD, for any number of rows. columns: a multiple of 16.
template <bool ADD>
void product(
    Left a, const BF16* packed, int64_t b_columns, float* c, int64_t c_step, int64_t rows, int64_t columns, int64_t pairs) {
    int64_t n = 0;
#ifdef TILES
    if (has_tiles && pairs % TILE == 0) {
        const int64_t done = product_of_tiles<ADD>(a, packed, b_columns, c, c_step, rows, columns, pairs);
        a = a.from(done), c += done * c_step, rows -= done;
    }
#endif
    for (; n + COLUMNS <= columns; n += COLUMNS) strip<4, ADD>(a, packed + 2 * n, b_columns, c + n, c_step, pairs, rows);
    for (; n < columns; n += LANES) strip<1, ADD>(a, packed + 2 * n, b_columns, c + n, c_step, pairs, rows);
}

// Exchange rows and columns of 16 × 16 numbers of 32 bits, in place.
void transpose(__m512i x[LANES]) {
    __m512i y[LANES];
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int half = 0; half < 2; ++half) {
            x[i + 2 * half] = _mm512_unpacklo_epi64(y[i + half], y[i + 2 + half]);
            x[i + 2 * half + 1] = _mm512_unpackhi_epi64(y[i + half], y[i + 2 + half]);
        }
    for (int i = 0; i < 4; ++i)
        for (int pair = 0; pair < 2; ++pair) {
            y[8 * pair + i] = _mm512_shuffle_i32x4(x[8 * pair + i], x[8 * pair + 4 + i], 0x88);
            y[8 * pair + 4 + i] = _mm512_shuffle_i32x4(x[8 * pair + i], x[8 * pair + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
    }
}

// Pack pairs of columns of x (n, D), whose rows lie `step` numbers apart: packed[k / 2][row][k % 2] = x[row][k]. Rows
// n .. capacity-1 are zero.
void pack_transposed(const BF16* x, int64_t step, int64_t n, int64_t d, int64_t capacity, BF16* packed) {
    for (int64_t row = 0; row < capacity; row += LANES)
        for (int64_t pair = 0; pair < d / 2; pair += LANES) {
            const int64_t pairs = std::min(LANES, d / 2 - pair);
            __m512i block[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                block[i] = _mm512_maskz_loadu_epi32(row + i < n ? (1u << pairs) - 1 : 0, x + (row + i) * step + 2 * pair);
            transpose(block);
            for (int64_t i = 0; i < pairs; ++i) _mm512_storeu_si512(packed + 2 * ((pair + i) * capacity + row), block[i]);
        }
}

// x0 … x15 y0 … y15 of two rows (D) of x (n, D) from column k on. Rows n and later are zero.
__m512i two_rows(const BF16* x, int64_t step, int64_t n, int64_t row, int64_t k) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i first = row < n ? _mm256_loadu_si256((const __m256i*)(x + row * step + k)) : none;
    const __m256i second = row + 1 < n ? _mm256_loadu_si256((const __m256i*)(x + (row + 1) * step + k)) : none;
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// Exchange rows and columns of up to QUERIES rows of x (n, D): columns[k][row] = x[row][k]. Rows n .. QUERIES-1 are zero.
void transpose_queries(const BF16* x, int64_t step, int64_t n, int64_t d, BF16* columns) {
    for (int64_t row = 0; row < QUERIES; row += 2 * LANES)
        for (int64_t k = 0; k < d; k += LANES) {
            __m512i block[LANES];
            for (int64_t i = 0; i < LANES; ++i) block[i] = interleaved(two_rows(x, step, n, row + 2 * i, k));
            transpose(block);
            for (int64_t i = 0; i < LANES; ++i) _mm512_storeu_si512(columns + (k + i) * QUERIES + row, block[i]);
        }
}

// Round x (D, capacity) to the rows of y (n, D), which lie `step` numbers apart.
void store_transposed(const float* x, int64_t capacity, BF16* y, int64_t step, int64_t n, int64_t d) {
    for (int64_t row = 0; row < n; row += LANES)
        for (int64_t k = 0; k < d; k += LANES) {
            __m512i block[LANES];
            for (int64_t i = 0; i < LANES; ++i) block[i] = _mm512_loadu_si512(x + (k + i) * capacity + row);
            transpose(block);
            for (int64_t i = 0; i < std::min(LANES, n - row); ++i)
                store(y + (row + i) * step + k, _mm512_castsi512_ps(block[i]));
        }
}

// Pack pairs of rows of x (n, D): packed[row / 2][k][row % 2] = x[row][k]. Rows n .. capacity-1 are zero; capacity is even.
void pack(const BF16* x, int64_t step, int64_t n, int64_t d, int64_t capacity, BF16* packed) {
    for (int64_t row = 0; row < capacity; row += 2)
        for (int64_t k = 0; k < d; k += LANES)
            _mm512_storeu_si512(packed + row * d + 2 * k, interleaved(two_rows(x, step, n, row, k)));
}

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Columns of a buffer for n_token keys. LANES more than needed, because rows at a distance of a power of two displace one
// another in the cache.
int64_t room_for(int64_t n_token) { return up_to(n_token, COLUMNS) + LANES; }

// One bit for each of the 16 keys from position `column` on: 1 for each key at or before the position `query`.
__mmask16 visible(int64_t column, int64_t query) {
    const int64_t n = query + 1 - column;
    return n >= LANES ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1);
}

// The output of one query head, block by block. q and out are (T, D) with rows q_step and out_step apart; lse is (T).
// scores, weights and block are working memory.
void forward(
    const BF16* q, int64_t q_step, const BF16* keys, const BF16* values, BF16* out, int64_t out_step, float* lse,
    int64_t n_token, int64_t capacity, int64_t d, std::vector<float>& scores, std::vector<BF16>& weights,
    std::vector<float>& block, const Scoring& scoring, int64_t h) {
    const bool changes = scoring.cap > 0 || scoring.slopes;
    __m512 capped;
    for (int64_t first = 0; first < n_token; first += QUERIES) {
        const int64_t rows = std::min(QUERIES, n_token - first);
        const int64_t columns = up_to(first + rows, COLUMNS);
        product<false>({q + first * q_step, q_step}, keys, capacity, scores.data(), capacity, rows, columns, d / 2);
        float scale[QUERIES];
        for (int64_t m = 0; m < rows; ++m) {
            float* s = scores.data() + m * capacity;
            const int64_t seen = up_to(first + m + 1, LANES), whole = (first + m + 1) / LANES * LANES;
            for (int64_t n = 0; changes && n < seen; n += LANES)
                _mm512_storeu_ps(s + n, modified(_mm512_loadu_ps(s + n), scoring, h, first + m, n, capped));
            __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
            for (int64_t n = 0; n < whole; n += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(s + n));
            if (whole < seen) most = _mm512_mask_max_ps(most, visible(whole, first + m), most, _mm512_loadu_ps(s + whole));
            float largest = _mm512_reduce_max_ps(most);
            if (scoring.sinks) largest = std::max(largest, scoring.sinks[h]);
            for (int64_t n = 0; n < seen; n += LANES) {
                const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(s + n), _mm512_set1_ps(largest)));
                const __m512 p = n < whole ? e : _mm512_maskz_mov_ps(visible(n, first + m), e);
                total = _mm512_add_ps(total, p);
                store(weights.data() + m * capacity + n, p);
            }
            for (int64_t n = seen; n < columns; n += LANES) store(weights.data() + m * capacity + n, _mm512_setzero_ps());
            float sum = _mm512_reduce_add_ps(total);
            if (scoring.sinks) sum += std::exp(scoring.sinks[h] - largest);
            scale[m] = 1 / sum;
            lse[first + m] = largest + std::log(sum);
        }
        product<false>({weights.data(), capacity}, values, d, block.data(), d, rows, d, columns / 2);
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t k = 0; k < d; k += LANES)
                store(
                    out + (first + m) * out_step + k,
                    _mm512_mul_ps(_mm512_loadu_ps(block.data() + m * d + k), _mm512_set1_ps(scale[m])));
    }
}

}  // namespace

// `steps` holds the strides of batch, head and token of each tensor (B, H, T, D), in the order of the arguments.

extern "C" int multiplies_bf16() { return 1; }

extern "C" void attend_forward(
    const BF16* q, const BF16* k, const BF16* v, BF16* out, float* lse, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_kv_head, int64_t n_token, int64_t d, float cap, const float* slopes, const float* sinks) {
    const Scoring scoring{cap, slopes, sinks};
    const int64_t shared = n_head / n_kv_head, capacity = room_for(n_token);
    const int64_t *sq = steps, *sk = steps + 3, *sv = steps + 6, *so = steps + 9;
#pragma omp parallel
    {
        const Tiles shapes;
        std::vector<BF16> keys(capacity * d), values(capacity * d), weights(QUERIES * capacity);
        std::vector<float> scores(QUERIES * capacity), block(QUERIES * d);
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < n_batch * n_kv_head; ++each) {
            const int64_t b = each / n_kv_head, g = each % n_kv_head;
            pack_transposed(k + b * sk[0] + g * sk[1], sk[2], n_token, d, capacity, keys.data());
            pack(v + b * sv[0] + g * sv[1], sv[2], n_token, d, capacity, values.data());
            for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
                forward(
                    q + b * sq[0] + h * sq[1], sq[2], keys.data(), values.data(), out + b * so[0] + h * so[1], so[2],
                    lse + (b * n_head + h) * n_token, n_token, capacity, d, scores, weights, block, scoring, h);
        }
    }
}

// With P = e^(scores - lse) and dP = d_out Vᵀ, the gradient of the scores is dS = P (dP - own), where own is the sum of
// out · d_out over a row. With a cap, dS is multiplied by the cap's derivative 1 - tanh². A sink is part of lse. Then d_q = dS K, d_k = dSᵀ Q and d_v = Pᵀ d_out.
extern "C" void attend_backward(
    const BF16* q, const BF16* k, const BF16* v, const BF16* out, const float* lse, const BF16* d_out, BF16* d_q, BF16* d_k,
    BF16* d_v, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_kv_head, int64_t n_token, int64_t d,
    float cap, const float* slopes) {
    const Scoring scoring{cap, slopes, nullptr};
    const bool changes = cap > 0 || slopes;
    const int64_t shared = n_head / n_kv_head, capacity = room_for(n_token);
    const int64_t *sq = steps, *sk = steps + 3, *sv = steps + 6, *so = steps + 9, *sg = steps + 12, *sdq = steps + 15,
                  *sdk = steps + 18, *sdv = steps + 21;
#pragma omp parallel
    {
        const Tiles shapes;
        std::vector<BF16> keys(capacity * d), values(capacity * d), key_rows(capacity * d), d_scores(QUERIES * KEYS);
        std::vector<BF16> p_pairs(QUERIES * KEYS), ds_pairs(QUERIES * KEYS), q_columns(d * QUERIES), g_columns(d * QUERIES);
        std::vector<float> scores(QUERIES * KEYS), d_weights(QUERIES * KEYS), block(QUERIES * d), dk(d * capacity), dv(d * capacity);
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < n_batch * n_kv_head; ++each) {
            const int64_t b = each / n_kv_head, g = each % n_kv_head;
            pack_transposed(k + b * sk[0] + g * sk[1], sk[2], n_token, d, capacity, keys.data());
            pack_transposed(v + b * sv[0] + g * sv[1], sv[2], n_token, d, capacity, values.data());
            pack(k + b * sk[0] + g * sk[1], sk[2], n_token, d, capacity, key_rows.data());
            std::fill(dk.begin(), dk.end(), 0.0f);
            std::fill(dv.begin(), dv.end(), 0.0f);
            for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
                const BF16 *qh = q + b * sq[0] + h * sq[1], *oh = out + b * so[0] + h * so[1];
                const BF16* gh = d_out + b * sg[0] + h * sg[1];
                for (int64_t first = 0; first < n_token; first += QUERIES) {
                    const int64_t rows = std::min(QUERIES, n_token - first), depth = up_to(rows, 2 * LANES);
                    const int64_t columns = up_to(first + rows, COLUMNS);
                    const float* block_lse = lse + (b * n_head + h) * n_token + first;
                    float own[QUERIES];
                    for (int64_t m = 0; m < rows; ++m) {
                        own[m] = 0;
                        for (int64_t c = 0; c < d; ++c)
                            own[m] += number(oh[(first + m) * so[2] + c]) * number(gh[(first + m) * sg[2] + c]);
                    }
                    transpose_queries(qh + first * sq[2], sq[2], rows, d, q_columns.data());
                    transpose_queries(gh + first * sg[2], sg[2], rows, d, g_columns.data());
                    std::fill(block.begin(), block.end(), 0.0f);
                    for (int64_t start = 0; start < columns; start += KEYS) {
                        product<false>({qh + first * sq[2], sq[2]}, keys.data() + 2 * start, capacity, scores.data(), KEYS, rows, KEYS, d / 2);
                        product<false>({gh + first * sg[2], sg[2]}, values.data() + 2 * start, capacity, d_weights.data(), KEYS, rows, KEYS, d / 2);
                        for (int64_t m = 0; m < depth; m += 2)
                            for (int64_t n = 0; n < KEYS; n += LANES) {
                                __m512 p[2], ds[2];
                                for (int64_t i = 0; i < 2; ++i) {
                                    p[i] = ds[i] = _mm512_setzero_ps();
                                    if (m + i >= rows) continue;
                                    const int64_t place = (m + i) * KEYS + n;
                                    const __mmask16 seen = visible(start + n, first + m + i);
                                    __m512 s = _mm512_loadu_ps(scores.data() + place), capped;
                                    if (changes) s = modified(s, scoring, h, first + m + i, start + n, capped);
                                    p[i] = _mm512_maskz_mov_ps(
                                        seen, exponential(_mm512_sub_ps(s, _mm512_set1_ps(block_lse[m + i]))));
                                    ds[i] = _mm512_maskz_mul_ps(
                                        seen, p[i], _mm512_sub_ps(_mm512_loadu_ps(d_weights.data() + place), _mm512_set1_ps(own[m + i])));
                                    if (cap > 0)
                                        ds[i] = _mm512_mul_ps(ds[i], _mm512_fnmadd_ps(capped, capped, _mm512_set1_ps(1)));
                                }
                                const int64_t place = m * KEYS + n, pair = 2 * ((m / 2) * KEYS + n);
                                const __m512i of_p = rounded(p[0], p[1]), of_ds = rounded(ds[0], ds[1]);
                                _mm512_storeu_si512(p_pairs.data() + pair, interleaved(of_p));
                                _mm512_storeu_si512(ds_pairs.data() + pair, interleaved(of_ds));
                                _mm256_storeu_si256((__m256i*)(d_scores.data() + place), _mm512_castsi512_si256(of_ds));
                                _mm256_storeu_si256((__m256i*)(d_scores.data() + place + KEYS), _mm512_extracti64x4_epi64(of_ds, 1));
                            }
                        product<true>({d_scores.data(), KEYS}, key_rows.data() + start * d, d, block.data(), d, rows, d, KEYS / 2);
                        product<true>({q_columns.data(), QUERIES}, ds_pairs.data(), KEYS, dk.data() + start, capacity, d, KEYS, depth / 2);
                        product<true>({g_columns.data(), QUERIES}, p_pairs.data(), KEYS, dv.data() + start, capacity, d, KEYS, depth / 2);
                    }
                    for (int64_t m = 0; m < rows; ++m)
                        for (int64_t c = 0; c < d; c += LANES)
                            store(
                                d_q + b * sdq[0] + h * sdq[1] + (first + m) * sdq[2] + c,
                                _mm512_loadu_ps(block.data() + m * d + c));
                }
            }
            store_transposed(dk.data(), capacity, d_k + b * sdk[0] + g * sdk[1], sdk[2], n_token, d);
            store_transposed(dv.data(), capacity, d_v + b * sdv[0] + g * sdv[1], sdv[2], n_token, d);
        }
    }
}

// The short convolution over tokens (attention/multihead.py), forward and backward.
//
// B sequences, H heads, T tokens, D the width of a head, K mixed tokens. y_t = x_t + Σ_i taps_i x_{t-i}. Sixteen channels are
// taken through all tokens at once. Their K newest tokens stay in registers, so that each number is read once.

namespace {

__m512 load(const BF16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// Tap `index` of 16 channels whose taps (16, K) begin at `taps`.
__m512 tap(const float* taps, int64_t n_mixed, int64_t index) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i place = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(int(n_mixed))), _mm512_set1_epi32(int(index)));
    return _mm512_i32gather_ps(place, taps, 4);
}

template <int K>
void convolve_channels(const BF16* x, int64_t x_step, const float* taps, BF16* y, int64_t y_step, int64_t n_token) {
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
void convolve_channels_backward(
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
void convolve_all(
    const BF16* x, const float* taps, BF16* y, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_token,
    int64_t d) {
#pragma omp parallel for collapse(3) schedule(static)
    for (int64_t b = 0; b < n_batch; ++b)
        for (int64_t h = 0; h < n_head; ++h)
            for (int64_t k = 0; k < d; k += LANES)
                convolve_channels<K>(
                    x + b * steps[0] + h * steps[1] + k, steps[2], taps + (h * d + k) * K,
                    y + b * steps[3] + h * steps[4] + k, steps[5], n_token);
}

template <int K>
void convolve_all_backward(
    const BF16* x, const float* taps, const BF16* dy, BF16* dx, float* d_taps, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_token, int64_t d) {
#pragma omp parallel for collapse(3) schedule(static)
    for (int64_t b = 0; b < n_batch; ++b)
        for (int64_t h = 0; h < n_head; ++h)
            for (int64_t k = 0; k < d; k += LANES)
                convolve_channels_backward<K>(
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

// x, y, dy, dx: (B, H, T, D) with a last stride of 1; steps: their strides of batch, head and token. taps (H, D, K);
// d_taps (B, H, D, K): the gradient of each sequence.
extern "C" void convolve_forward(
    const BF16* x, const float* taps, BF16* y, const int64_t* steps, int64_t n_batch, int64_t n_head, int64_t n_token,
    int64_t d, int64_t n_mixed) {
#define CALL(K) convolve_all<K>(x, taps, y, steps, n_batch, n_head, n_token, d)
    FOR_MIXED(CALL)
#undef CALL
}

extern "C" void convolve_backward(
    const BF16* x, const float* taps, const BF16* dy, BF16* dx, float* d_taps, const int64_t* steps, int64_t n_batch,
    int64_t n_head, int64_t n_token, int64_t d, int64_t n_mixed) {
#define CALL(K) convolve_all_backward<K>(x, taps, dy, dx, d_taps, steps, n_batch, n_head, n_token, d)
    FOR_MIXED(CALL)
#undef CALL
}

#else
extern "C" int multiplies_bf16() { return 0; }
#endif
