// Decoding on a CPU: the operations of one new token. Each operation reads its weights, or its part of the cache, once.
//
// n_row rows of n_in numbers become rows of n_out numbers. A row is computed the same way, bit for bit, whatever rows are
// computed with it. Activations are fp32 or bf16; bf16 is the upper half of the bits of an fp32. All sums are fp32 or exact
// integers. The code is C++ with GCC's vector types, which the compiler maps to the processor's vectors; where a processor has
// instructions that the compiler does not find, they are called by name. Tests compare these kernels with torch's linear and
// rms_norm, `Int8Linear.readable`, `Int4Linear.readable` and MultiHeadAttention.forward.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

// Numbers in a vector register. With wider vectors g++ keeps the sums in memory.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;  // NEON and SSE
#endif
constexpr int64_t SUMS = LANES == 4 ? 8 : 4;  // independent sums of a product; ARM's processors add up to four vectors at once
constexpr float OWN_VALUE_EPSILON = 1e-6f;  // as in attention/multihead.py
using Floats = float __attribute__((vector_size(4 * LANES)));

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
void store(BF16* place, float x) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    place->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
float rounded(float x) {
    T kept;
    store(&kept, x);
    return number(kept);
}

Floats vector(const float* x) {
    Floats v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
Floats vector(const BF16* x) {  // by name, because g++ takes up to seven instructions where the processors have one or two
#if defined(__AVX512F__)
    return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
#elif defined(__AVX2__)
    return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
#elif defined(__ARM_NEON)
    return Floats(vshll_n_u16(vld1_u16(&x->bits), 16));
#else
    Floats v;
    for (int64_t lane = 0; lane < LANES; ++lane) v[lane] = number(x[lane]);
    return v;
#endif
}

template <int64_t N, typename Number = float>
struct Vector {
    typedef Number Of __attribute__((vector_size(sizeof(Number) * N)));
};

// `number`, `store` and `rounded` of N numbers that lie side by side.
template <int64_t N>
typename Vector<N>::Of numbers(const float* x) {
    typename Vector<N>::Of v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
template <int64_t N>
typename Vector<N>::Of numbers(const BF16* x) {
    typename Vector<N, uint16_t>::Of half;
    std::memcpy(&half, x, sizeof half);
    return typename Vector<N>::Of(__builtin_convertvector(half, typename Vector<N, uint32_t>::Of) << 16);
}
template <int64_t N>
void store(float* place, typename Vector<N>::Of v) { std::memcpy(place, &v, sizeof v); }
template <int64_t N>
void store(BF16* place, typename Vector<N>::Of v) {
    using Bits = typename Vector<N, uint32_t>::Of;
    const Bits bits = Bits(v), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const auto half = __builtin_convertvector(v != v ? Bits{} + 0x7fc0 : nearest, typename Vector<N, uint16_t>::Of);
    std::memcpy(place, &half, sizeof half);
}
template <typename T, int64_t N>
typename Vector<N>::Of rounded(typename Vector<N>::Of v) {
    T kept[N];
    store<N>(kept, v);
    return numbers<N>(kept);
}

template <int64_t N, typename Number = float>
Number sum(typename Vector<N, Number>::Of v) {  // by halves, so that few additions wait for each other
    if constexpr (N == 4) return (v[0] + v[2]) + (v[1] + v[3]);
    else {
        typename Vector<N / 2, Number>::Of low, high;
        std::memcpy(&low, &v, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return sum<N / 2, Number>(low + high);
    }
}

template <int64_t N>
float largest_in(typename Vector<N>::Of v) {  // by halves, too
    if constexpr (N == 4) return std::max(std::max(v[0], v[2]), std::max(v[1], v[3]));
    else {
        typename Vector<N / 2>::Of low, high;
        std::memcpy(&low, &v, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return largest_in<N / 2>(low > high ? low : high);
    }
}

constexpr int64_t TILE = 4;  // rows of x that share one load of a weight

// The end of a sum of products: what the loops in `dots` leave, from number k on. Never inlined, because the compiler may
// change the order of a sum in each copy, and rows in a tile must equal rows by themselves.
template <typename W>
__attribute__((noinline)) float finish(Floats* sums, const W* w, const float* x, int64_t k, int64_t n) {
    for (; k + LANES <= n; k += LANES) sums[0] += vector(w + k) * vector(x + k);
    for (int64_t i = 1; i < SUMS; ++i) sums[0] += sums[i];
    float total = sum<LANES>(sums[0]);
    for (; k < n; ++k) total += number(w[k]) * x[k];
    return total;
}

// R products of w with consecutive rows of x (R, n). As in `dot`, there are independent sums.
template <int64_t R, typename W>
void dots(const W* w, const float* x, int64_t n, float* totals) {
    Floats sums[R][SUMS] = {};
    int64_t k = 0;
    for (; k + SUMS * LANES <= n; k += SUMS * LANES)
#pragma GCC unroll SUMS
        for (int64_t i = 0; i < SUMS; ++i) {
            const Floats weights = vector(w + k + i * LANES);
#pragma GCC unroll TILE
            for (int64_t r = 0; r < R; ++r) sums[r][i] += weights * vector(x + r * n + k + i * LANES);
        }
#pragma GCC unroll TILE
    for (int64_t r = 0; r < R; ++r) {
        Floats kept[SUMS];  // a copy, so that the sums of the loop above stay in registers
#pragma GCC unroll SUMS
        for (int64_t i = 0; i < SUMS; ++i) kept[i] = sums[r][i];
        totals[r] = finish(kept, w, x + r * n, k, n);
    }
}

// R products of each of two consecutive rows of w with consecutive rows of x, for processors with few registers: the sums that
// `dots` keeps side by side are made one after another, in the same order of numbers. Product r of row o is number 2 r + o.
template <int64_t R, typename W>
void dots_of_two(const W* w, const float* x, int64_t n, float* totals) {
    constexpr int64_t STEP = SUMS * LANES, IN_CACHE = 32 * STEP;  // numbers of each row that stay in the first cache meanwhile
    const int64_t whole = n / STEP * STEP;
    Floats sums[2][R][SUMS] = {};
    for (int64_t start = 0; start < whole; start += IN_CACHE)
        for (int64_t i = 0; i < SUMS; ++i) {
            Floats own[2][R];
#pragma GCC unroll 8
            for (int64_t a = 0; a < 2 * R; ++a) own[a / R][a % R] = sums[a / R][a % R][i];
            for (int64_t k = start + i * LANES; k < std::min(start + IN_CACHE, whole); k += STEP) {
                const Floats weights[2] = {vector(w + k), vector(w + n + k)};
#pragma GCC unroll 4
                for (int64_t r = 0; r < R; ++r) {
                    Floats numbers = vector(x + r * n + k);
#ifdef __AVX2__
                    asm("" : "+x"(numbers));  // g++ would load them again for the second row
#endif
                    own[0][r] += weights[0] * numbers;
                    own[1][r] += weights[1] * numbers;
                }
            }
#pragma GCC unroll 8
            for (int64_t a = 0; a < 2 * R; ++a) sums[a / R][a % R][i] = own[a / R][a % R];
        }
    for (int64_t r = 0; r < R; ++r)
        for (int64_t o = 0; o < 2; ++o) totals[2 * r + o] = finish(sums[o][r], w + o * n, x + r * n, whole, n);
}

// Independent sums, because with a single sum each addition would wait for the addition before it. Only with its loops
// unrolled does g++ keep them in registers.
template <typename W>
float dot(const W* w, const float* x, int64_t n) {
    Floats sums[SUMS] = {};
    int64_t k = 0;
    for (; k + SUMS * LANES <= n; k += SUMS * LANES)
#pragma GCC unroll SUMS
        for (int64_t i = 0; i < SUMS; ++i) sums[i] += vector(w + k + i * LANES) * vector(x + k + i * LANES);
    for (; k + LANES <= n; k += LANES) sums[0] += vector(w + k) * vector(x + k);
#pragma GCC unroll SUMS
    for (int64_t i = 1; i < SUMS; ++i) sums[0] += sums[i];
    float total = sum<LANES>(sums[0]);
    for (; k < n; ++k) total += number(w[k]) * x[k];
    return total;
}

// Whether one instruction multiplies pairs of bf16 and adds them in fp32. Both factors are then bf16.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool HAS_BF16_PRODUCTS = true;

float dot(const BF16* w, const BF16* x, int64_t n) {
    const auto at = [](const BF16* place) { return vreinterpretq_bf16_u16(vld1q_u16(&place->bits)); };
    float32x4_t sums[4] = {};
    int64_t k = 0;
    for (; k + 32 <= n; k += 32)
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) sums[i] = vbfdotq_f32(sums[i], at(w + k + 8 * i), at(x + k + 8 * i));
    for (; k + 8 <= n; k += 8) sums[0] = vbfdotq_f32(sums[0], at(w + k), at(x + k));
    float total = vaddvq_f32((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; k < n; ++k) total += number(w[k]) * number(x[k]);
    return total;
}

template <int64_t R>
void dots(const BF16* w, const BF16* x, int64_t n, float* totals) {
    for (int64_t r = 0; r < R; ++r) totals[r] = dot(w, x + r * n, n);
}
#elif defined(__AVX512BF16__)
constexpr bool HAS_BF16_PRODUCTS = true;  // by `square`
#else
constexpr bool HAS_BF16_PRODUCTS = false;
#endif
template <typename T>
using Factor = std::conditional_t<HAS_BF16_PRODUCTS, T, float>;

template <typename To, typename T>
std::vector<To> copied(const T* x, int64_t n) {
    std::vector<To> copy(n);
    for (int64_t k = 0; k < n; ++k) store(&copy[k], number(x[k]));
    return copy;
}

// Whether the processor adds up products of a signed byte and a Byte in one instruction (VNNI, or ARM's dot product).
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_BYTE_PRODUCTS 1
#else
#define HAS_BYTE_PRODUCTS 0
#endif
#ifdef __ARM_FEATURE_DOTPROD
using Byte = int8_t;
#else
using Byte = uint8_t;
#endif
constexpr int32_t SHIFT = std::is_signed_v<Byte> ? -128 : 32768;  // brings 16 bits with a sign into the range of 256 high + low

// A row of numbers as step · u, with u an integer of 16 bits, so that products with int8 weights are integer sums. If the
// processor multiplies bytes, u + SHIFT = 256 high + low is kept in two of them.
struct alignas(64) Line {  // of the cache: a vector that lies in two of them takes twice as long to load
    Byte bytes[64];
};

struct Integers {
    std::vector<int16_t> whole;
    std::vector<Line> highs, lows;
    float step;

    const Byte* high() const { return highs.data()->bytes; }
    const Byte* low() const { return lows.data()->bytes; }
};

template <typename T>
Integers in_integers(const T* x, int64_t n) {
    const int64_t n_whole = HAS_BYTE_PRODUCTS ? 0 : (n + 3) / 4 * 4, n_line = HAS_BYTE_PRODUCTS ? (n + 63) / 64 : 0;
    Integers row{std::vector<int16_t>(n_whole), std::vector<Line>(n_line), std::vector<Line>(n_line), 0};
    Floats largest_of = {};
    decltype(largest_of < 0) unequal = {};  // where a number is not equal to itself, which is NaN
    float largest = 0;
    bool is_nan = false;
    int64_t whole = 0;
    for (; whole + LANES <= n; whole += LANES) {
        const Floats v = vector(x + whole), size = v < 0 ? -v : v;
        largest_of = size > largest_of ? size : largest_of;
        unequal |= v != v;
    }
    for (int64_t k = whole; k < n; ++k) {
        largest = std::max(largest, std::fabs(number(x[k])));
        is_nan |= number(x[k]) != number(x[k]);
    }
    for (int64_t lane = 0; lane < LANES; ++lane) {
        largest = std::max(largest, largest_of[lane]);
        is_nan |= unequal[lane] != 0;
    }
    row.step = is_nan || !std::isfinite(largest) ? NAN : largest / 32767;
    const float step = row.step > 0 ? row.step : INFINITY;  // so zeros stay zeros
    Byte *high = row.highs.data()->bytes, *low = row.lows.data()->bytes;
    for (int64_t k = 0; k < n; ++k) {
        const int32_t u = int32_t(std::rint(std::min(32767.0f, std::max(-32767.0f, number(x[k]) / step))));
        if (HAS_BYTE_PRODUCTS) {
            low[k] = Byte(u + SHIFT);
            high[k] = Byte((u + SHIFT - low[k]) / 256);
        } else row.whole[k] = int16_t(u);
    }
    return row;
}

// Weights in 8 and 4 bits. The rows are kept in blocks of BLOCK, so that a vector holds numbers of LANES rows, whose sums need
// no addition across the vector. Rows and columns beyond the matrix are 0.
// 8 bits: weight = integer · scale of its row. weight (blocks, quads, BLOCK, 4) in bytes, each quad four columns; scale (rows).
// 4 bits: weight = (q - 8) · scale of its group of GROUP columns, q from 0 to 15. weight (blocks, groups, 4, BLOCK, 4) in bytes,
// of which byte j of part i has q of column 8 i + j of the group in its lower half, and of column 8 i + 4 + j in its upper half;
// scale (blocks, groups, BLOCK).
constexpr int64_t BLOCK = 16, GROUP = 32;
using Ints = Vector<LANES, int32_t>::Of;
using Quads = Vector<4 * LANES, uint8_t>::Of;  // four numbers of each of LANES rows

int64_t quads(int64_t n_in) { return (n_in + 3) / 4; }
int64_t groups(int64_t n_in) { return (n_in + GROUP - 1) / GROUP; }

// A row of numbers in 8 bits: number = step of its group · byte. shift: -8 times the sum of the group's bytes.
struct Bytes {
    std::vector<int8_t> bytes;
    std::vector<float> steps;
    std::vector<int32_t> shifts;
};

// `in` holds the numbers of one group. A group with a number that is not finite has the step NaN.
template <typename T>
void in_bytes(const T* in, int8_t* bytes, float* step, int32_t* shift) {
    constexpr float TO_INTEGER = 12582912;  // 1.5 · 2^23: after adding it, the last bits of a float are the nearest integer
    Floats largest_of = {};
    Ints unequal = {};  // as in `in_integers`
    for (int64_t k = 0; k < GROUP; k += LANES) {
        const Floats v = vector(in + k), size = v < 0 ? -v : v;
        largest_of = size > largest_of ? size : largest_of;
        unequal |= v != v;
    }
    const float largest = largest_in<LANES>(largest_of);
    *step = sum<LANES, int32_t>(unequal) || !std::isfinite(largest) ? NAN : largest / 127;
    const float in_steps = largest > 1e-35f ? 127 / largest : 0;  // the inverse of a smaller number is not finite
    Ints sums = {};
    for (int64_t k = 0; k < GROUP; k += LANES) {
        const Ints whole = Ints(vector(in + k) * in_steps + TO_INTEGER) << 24 >> 24;
        const auto narrow = __builtin_convertvector(whole, Vector<LANES, int8_t>::Of);
        std::memcpy(bytes + k, &narrow, sizeof narrow);
        sums += whole;
    }
    *shift = -8 * sum<LANES, int32_t>(sums);
}

template <typename T>
Bytes in_bytes(const T* x, int64_t n) {
    const int64_t n_group = groups(n);
    Bytes row{std::vector<int8_t>(n_group * GROUP), std::vector<float>(n_group), std::vector<int32_t>(n_group)};
    T last[GROUP] = {};  // with zeros beyond the row, if it ends inside a group
    std::copy(x + n / GROUP * GROUP, x + n, last);
    for (int64_t g = 0; g < n_group; ++g)
        in_bytes(g < n / GROUP ? x + g * GROUP : last, &row.bytes[g * GROUP], &row.steps[g], &row.shifts[g]);
    return row;
}

Quads in_each(const void* x) {  // four bytes
    int32_t four;
    std::memcpy(&four, x, 4);
    return Quads(Ints{} + four);
}

#if HAS_BYTE_PRODUCTS
// Adds to each lane the sum of four products: of bytes without a sign (ARM: with) and bytes with a sign.
Ints add_four(Ints sums, Quads bytes, Quads with_sign) {
#if defined(__AVX512VNNI__)
    return Ints(_mm512_dpbusd_epi32(__m512i(sums), __m512i(bytes), __m512i(with_sign)));
#elif defined(__AVXVNNI__)
    return Ints(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(bytes), __m256i(with_sign)));
#else
    return Ints(vdotq_s32(int32x4_t(sums), int8x16_t(bytes), int8x16_t(with_sign)));
#endif
}
#endif

// Sums of products with a group. `add` adds to each lane those of its eight q in `packed` and x; `whole` gives the sums.
#if HAS_BYTE_PRODUCTS
using QuadSums = Ints;

QuadSums add(QuadSums sums, Quads packed, const int8_t* x) {
    return add_four(add_four(sums, packed & 15, in_each(x)), packed >> 4, in_each(x + 4));
}
Ints whole(QuadSums sums) { return sums; }
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
using QuadSums = Vector<2 * LANES, int16_t>::Of;  // two sums in each lane, each of 16 products of at most 15 · 127: they fit

QuadSums add_pairs(QuadSums sums, Quads q, const int8_t* x) {
#ifdef __AVX512BW__
    return sums + QuadSums(_mm512_maddubs_epi16(__m512i(q), __m512i(in_each(x))));
#else
    return sums + QuadSums(_mm256_maddubs_epi16(__m256i(q), __m256i(in_each(x))));
#endif
}
QuadSums add(QuadSums sums, Quads packed, const int8_t* x) {
    return add_pairs(add_pairs(sums, packed & 15, x), packed >> 4, x + 4);
}
Ints whole(QuadSums sums) {
#ifdef __AVX512BW__
    return Ints(_mm512_madd_epi16(__m512i(sums), _mm512_set1_epi16(1)));
#else
    return Ints(_mm256_madd_epi16(__m256i(sums), _mm256_set1_epi16(1)));
#endif
}
#else
using QuadSums = Ints;

QuadSums add(QuadSums sums, Quads packed, const int8_t* x) {
    for (int64_t lane = 0; lane < LANES; ++lane)
        for (int64_t j = 0; j < 4; ++j)
            sums[lane] += int32_t(packed[4 * lane + j] & 15) * x[j] + int32_t(packed[4 * lane + j] >> 4) * x[4 + j];
    return sums;
}
Ints whole(QuadSums sums) { return sums; }
#endif

// The compiler may not change the order of the product or sum that v is part of: rows in a tile must equal rows by themselves.
void keep_order(Floats& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__ARM_NEON)
    asm("" : "+w"(v));
#else
    asm("" : "+m"(v));
#endif
}

constexpr int64_t BYTES_AHEAD = 2048;
constexpr int64_t AHEAD = 8;  // groups: memory is read at 43 GB/s instead of 37, because processors follow two streams less well

// The products of a block of weight rows with R rows of x: that of weight row o and row r is values[r * BLOCK + o].
template <int64_t R>
void block_products(const uint8_t* weight, const BF16* scale, const Bytes* const* x, int64_t n_group, float* values) {
    constexpr int64_t N = BLOCK / LANES;
    Floats totals[R][N] = {};
    for (int64_t g = 0; g < n_group; ++g, weight += GROUP / 2 * BLOCK, scale += BLOCK) {
        QuadSums sums[R][N] = {};
        if (R < TILE) {  // of more rows, the next blocks are fetched in parts: see `Tile`
#pragma GCC unroll 4
            for (int64_t i = 0; i < GROUP / 8; ++i) __builtin_prefetch(weight + AHEAD * GROUP / 2 * BLOCK + 4 * i * BLOCK);
            __builtin_prefetch(scale + AHEAD * BLOCK);
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < GROUP / 8; ++i)
#pragma GCC unroll 4
            for (int64_t v = 0; v < N; ++v) {
                Quads packed;
                std::memcpy(&packed, weight + 4 * (i * BLOCK + v * LANES), sizeof packed);
#pragma GCC unroll 4
                for (int64_t r = 0; r < R; ++r) sums[r][v] = add(sums[r][v], packed, &x[r]->bytes[g * GROUP + 8 * i]);
            }
#pragma GCC unroll 4
        for (int64_t v = 0; v < N; ++v)
#pragma GCC unroll 4
            for (int64_t r = 0; r < R; ++r) {
                Floats step = vector(scale + v * LANES) * x[r]->steps[g];
                keep_order(step);
                totals[r][v] += __builtin_convertvector(whole(sums[r][v]) + x[r]->shifts[g], Floats) * step;
            }
    }
    std::memcpy(values, totals, sizeof totals);
}

// Of a block of weight rows in 8 bits, the exact sums of integer · u with R rows of x.
using Exact = Vector<LANES, double>::Of;
constexpr int64_t N_VECTOR = BLOCK / LANES;

#if HAS_BYTE_PRODUCTS
template <int64_t R>
void byte_sums(const int8_t* weight, const Integers* const* x, int64_t n_quad, const Exact* shift, Exact (*totals)[N_VECTOR]) {
    Ints highs[R][N_VECTOR] = {}, lows[R][N_VECTOR] = {};
    for (int64_t q = 0; q < n_quad; ++q, weight += 4 * BLOCK) {
        if (R < TILE) __builtin_prefetch(weight + BYTES_AHEAD);
#pragma GCC unroll 4
        for (int64_t v = 0; v < N_VECTOR; ++v) {
            Quads w;
            std::memcpy(&w, weight + 4 * v * LANES, sizeof w);
#pragma GCC unroll 4
            for (int64_t r = 0; r < R; ++r) {
                highs[r][v] = add_four(highs[r][v], in_each(x[r]->high() + 4 * q), w);
                lows[r][v] = add_four(lows[r][v], in_each(x[r]->low() + 4 * q), w);
            }
        }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t v = 0; v < N_VECTOR; ++v)
            totals[r][v] =
                256 * __builtin_convertvector(highs[r][v], Exact) + __builtin_convertvector(lows[r][v], Exact) - shift[v];
}
#else
constexpr int64_t QUADS_EXACT = 128;  // so many sums of four products of int8 and int16 fit 32 bits

// A row of four bytes has two lanes of `sums`: the products of its bytes and x are added, of the first two and of the last two.
Ints add_pairs(Ints sums, const int8_t* bytes, const int16_t* x) {
    int64_t four;
    std::memcpy(&four, x, sizeof four);
#if defined(__AVX512BW__)
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
    return sums + Ints(_mm512_madd_epi16(wide, _mm512_set1_epi64(four)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)bytes));
    return sums + Ints(_mm256_madd_epi16(wide, _mm256_set1_epi64x(four)));
#elif defined(__SSE2__) && !defined(__AVX2__)
    const __m128i twice = _mm_loadl_epi64((const __m128i*)bytes);
    const __m128i wide = _mm_srai_epi16(_mm_unpacklo_epi8(twice, twice), 8);
    return sums + Ints(_mm_madd_epi16(wide, _mm_set1_epi64x(four)));
#elif defined(__aarch64__)
    const int16x8_t wide = vmovl_s8(vld1_s8(bytes));
    const int16x4_t columns = vld1_s16(x);
    return sums + Ints(vpaddq_s32(vmull_s16(vget_low_s16(wide), columns), vmull_s16(vget_high_s16(wide), columns)));
#else
    for (int64_t i = 0; i < LANES; ++i) sums[i] += bytes[2 * i] * x[i % 2 * 2] + bytes[2 * i + 1] * x[i % 2 * 2 + 1];
    return sums;
#endif
}

template <int64_t R>
void byte_sums(const int8_t* weight, const Integers* const* x, int64_t n_quad, const Exact*, Exact (*totals)[N_VECTOR]) {
    std::fill(totals[0], totals[R], Exact{});
    for (int64_t start = 0; start < n_quad; start += QUADS_EXACT) {
        const int64_t stop = std::min(n_quad, start + QUADS_EXACT);
        for (int64_t r = 0; r < R; ++r) {
            Ints sums[2 * N_VECTOR] = {};  // two of each row
            for (int64_t q = start; q < stop; ++q)
#pragma GCC unroll 8
                for (int64_t i = 0; i < 2 * N_VECTOR; ++i)
                    sums[i] = add_pairs(sums[i], weight + 4 * q * BLOCK + 2 * i * LANES, x[r]->whole.data() + 4 * q);
            for (int64_t i = 0; i < 2 * N_VECTOR; ++i)
                for (int64_t k = 0; k < LANES / 2; ++k)
                    totals[r][i / 2][i % 2 * LANES / 2 + k] += double(sums[i][2 * k]) + double(sums[i][2 * k + 1]);
        }
    }
}
#endif

// Weight (n_out, n_in) in type T. If scales (n_out) are given, the weight is in 8 bits, with the sums of its rows; if scales of
// groups, in 4 bits. bias is (n_out) or null.
template <typename T>
struct Matrix {
    const void* weight;
    const float* scale;
    const int32_t* sums;
    const T* bias;
    int64_t n_in, n_out;
    const BF16* group_scale;
};

template <typename T>
bool in_blocks(const Matrix<T>& matrix) { return matrix.scale || matrix.group_scale; }

template <typename T>
int64_t bytes_of_row(const Matrix<T>& matrix) {
    if (matrix.group_scale) return groups(matrix.n_in) * GROUP / 2;
    return matrix.scale ? 4 * quads(matrix.n_in) : matrix.n_in * int64_t(sizeof(T));
}

// Input rows in the form that the matrix needs. numbers: (n_row, n_in), which are x itself if it has this form.
template <typename T>
struct Rows {
    const Factor<T>* numbers;
    std::vector<Factor<T>> copy;
    std::vector<Integers> integers;
    std::vector<Bytes> bytes;
};

// Of few rows, every thread of the team makes its own form, because waiting for a shared one would take longer.
template <typename T>
const Rows<T>& rows_for(const Matrix<T>& matrix, const T* x, int64_t n_row, Rows<T>& own, Rows<T>& shared) {
    const int64_t n_in = matrix.n_in;
    if constexpr (std::is_same_v<T, Factor<T>>) own.numbers = x;
    const bool is_whole = !in_blocks(matrix);
    if (is_whole && std::is_same_v<T, Factor<T>>) return own;
    Rows<T>& rows = n_row > TILE ? shared : own;
    const auto enlarge = [&] {
        rows.copy.resize(is_whole ? n_row * n_in : 0);
        rows.integers.resize(matrix.scale ? n_row : 0);
        rows.bytes.resize(matrix.group_scale ? n_row : 0);
        if constexpr (!std::is_same_v<T, Factor<T>>) rows.numbers = rows.copy.data();
    };
    const auto form = [&](int64_t m) {
        if (matrix.scale) rows.integers[m] = in_integers(x + m * n_in, n_in);
        else if (matrix.group_scale) rows.bytes[m] = in_bytes(x + m * n_in, n_in);
        else
            for (int64_t k = m * n_in; k < (m + 1) * n_in; ++k) store(&rows.copy[k], number(x[k]));
    };
    if (n_row > TILE) {
#pragma omp single
        enlarge();
#pragma omp for schedule(static)
        for (int64_t m = 0; m < n_row; ++m) form(m);
    } else {
        enlarge();
        for (int64_t m = 0; m < n_row; ++m) form(m);
    }
    return rows;
}

#ifdef __AVX512BF16__
// Products of OUTPUTS rows of a weight with R rows of x, of n_byte bytes each: pairs of bf16 with fp32 sums. Each number loaded
// is used in several products. A sum is the same, bit for bit, for every R.
// ONE_BY_ONE reads the weights in the order of memory, which processors read more than twice as fast as four rows beside each
// other; else they should be in the cache.
constexpr int64_t OUTPUTS = 4;

// The sum of each of 16 vectors. That of vector 4 o + r is number 4 r + o of the result. By halves, as in `sum`.
__attribute__((always_inline)) inline Floats sums_of_each(const Floats* v) {
    const auto halves = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee); };
    const auto quarters = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
    const auto eighths = [](__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee); };
    const auto sixteenths = [](__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd); };
    __m512 four[4];
#pragma GCC unroll 4
    for (int64_t o = 0; o < 4; ++o)
        four[o] = quarters(halves(v[4 * o], v[4 * o + 1]), halves(v[4 * o + 2], v[4 * o + 3]));
    return sixteenths(eighths(four[0], four[1]), eighths(four[2], four[3]));
}

// The product of weight row o and row r is number 4 r + o of `totals`.
template <int64_t R, bool ONE_BY_ONE>
__attribute__((always_inline)) inline void square(const char* const* w, const char* const* x, int64_t n_byte, float* totals) {
    constexpr int64_t TOGETHER = ONE_BY_ONE ? 1 : OUTPUTS;
    Floats kept[16] = {};
#pragma GCC unroll 4
    for (int64_t first = 0; first < OUTPUTS; first += TOGETHER) {
        Floats sums[TOGETHER * R] = {};
        const auto add = [&](int64_t k, __mmask64 here) {
            __m512i rows[R];
#pragma GCC unroll 4
            for (int64_t r = 0; r < R; ++r) rows[r] = _mm512_maskz_loadu_epi8(here, x[r] + k);
#pragma GCC unroll 4
            for (int64_t o = 0; o < TOGETHER; ++o) {
                __m512i weights = _mm512_maskz_loadu_epi8(here, w[first + o] + k);
                asm("" : "+v"(weights));  // g++ would load them again for each row
#pragma GCC unroll 4
                for (int64_t r = 0; r < R; ++r)
                    sums[R * o + r] = _mm512_dpbf16_ps(sums[R * o + r], (__m512bh)weights, (__m512bh)rows[r]);
            }
        };
        int64_t k = 0;
        for (; k + 64 <= n_byte; k += 64) add(k, ~__mmask64(0));
        if (k < n_byte) add(k, (__mmask64(1) << (n_byte - k)) - 1);
#pragma GCC unroll 4
        for (int64_t o = 0; o < TOGETHER; ++o)
#pragma GCC unroll 4
            for (int64_t r = 0; r < R; ++r) kept[4 * (first + o) + r] = sums[R * o + r];
    }
    store<LANES>(totals, sums_of_each(kept));
}

void square(int64_t n_row, bool cached, const char* const* w, const char* const* x, int64_t n_byte, float* totals) {
    if (n_row == 1) square<1, true>(w, x, n_byte, totals);
    else if (n_row == 2) square<2, true>(w, x, n_byte, totals);
    else if (!cached) square<4, true>(w, x, n_byte, totals);
    else square<4, false>(w, x, n_byte, totals);
}
#else
constexpr int64_t OUTPUTS = LANES == 8 ? 2 : 1;  // AVX2: by `dots_of_two`
#endif

constexpr int64_t IN_CACHE = 16;  // outputs whose weights stay in a core's cache while one tile of rows after another reads them

// A tile of a product: rows m .. m + n_row-1 and outputs n .. n + n_out-1, of at most `width`. If n_part is not 0, the weights
// of the next IN_CACHE outputs, from `next` on, are fetched in n_part parts, of which this tile fetches number `part`; its own
// are in the cache.
struct Tile {
    int64_t m, n_row, n, n_out, width, next, part, n_part;
};

constexpr int64_t WIDEST = std::max(BLOCK, OUTPUTS);

// `products` with weights in 8 or 4 bits.
template <typename T>
void products_of_blocks(const Matrix<T>& matrix, const Rows<T>& rows, const Tile& tile, float* values) {
    const auto row = [&](int64_t r) { return tile.m + std::min(r, tile.n_row - 1); };  // beyond n_row: the last one again
    if (matrix.group_scale) {
        const int64_t n_group = groups(matrix.n_in), before = tile.n / BLOCK * n_group;
        const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight) + before * GROUP / 2 * BLOCK;
        const BF16* scale = matrix.group_scale + before * BLOCK;
        const Bytes* x[TILE];
        for (int64_t r = 0; r < TILE; ++r) x[r] = &rows.bytes[row(r)];
        if (tile.n_row == 1) block_products<1>(weight, scale, x, n_group, values);
        else if (tile.n_row == 2) block_products<2>(weight, scale, x, n_group, values);
        else block_products<TILE>(weight, scale, x, n_group, values);
        return;
    }
    const int64_t n_quad = quads(matrix.n_in);
    const int8_t* weight = static_cast<const int8_t*>(matrix.weight) + tile.n * 4 * n_quad;
    const Integers* x[TILE];
    for (int64_t r = 0; r < TILE; ++r) x[r] = &rows.integers[row(r)];
    float scale[BLOCK] = {};
    Exact shift[N_VECTOR] = {}, totals[TILE][N_VECTOR];  // doubles hold the sums exactly
    for (int64_t o = 0; o < tile.n_out; ++o) {
        scale[o] = matrix.scale[tile.n + o];
        shift[o / LANES][o % LANES] = double(SHIFT) * matrix.sums[tile.n + o];
    }
    if (tile.n_row == 1) byte_sums<1>(weight, x, n_quad, shift, totals);
    else if (tile.n_row == 2) byte_sums<2>(weight, x, n_quad, shift, totals);
    else if (LANES == 16) byte_sums<TILE>(weight, x, n_quad, shift, totals);
    else  // more sums do not fit the registers
        for (int64_t r = 0; r < TILE; r += 2) byte_sums<2>(weight, x + r, n_quad, shift, totals + r);
    for (int64_t r = 0; r < tile.n_row; ++r)
        for (int64_t v = 0; v < N_VECTOR; ++v) {
            const Floats in_steps = __builtin_convertvector(totals[r][v], Floats) * vector(scale + v * LANES);
            store<LANES>(values + r * BLOCK + v * LANES, in_steps * rows.integers[tile.m + r].step);
        }
}

// Entry o of row r of a tile is values[r * width + o].
template <typename T>
void products(const Matrix<T>& matrix, const Rows<T>& rows, const Tile& tile, float* values) {
    const auto [m, n_row, n, n_out, width, next, part, n_part] = tile;
    const int64_t n_in = matrix.n_in;
    if (n_part) {
        const int64_t n_byte = IN_CACHE * bytes_of_row(matrix);
        const char* first = static_cast<const char*>(matrix.weight) + next * bytes_of_row(matrix);
        for (int64_t k = n_byte * part / n_part; k < n_byte * (part + 1) / n_part; k += 64) __builtin_prefetch(first + k, 0, 2);
    }
    if (in_blocks(matrix)) products_of_blocks(matrix, rows, tile, values);
    else {
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<T, BF16>) {
            const int64_t n_byte = bytes_of_row(matrix);
            const char *w[OUTPUTS], *x[TILE];  // what is beyond n_out and n_row repeats the last one, and is not read
            for (int64_t o = 0; o < OUTPUTS; ++o)
                w[o] = static_cast<const char*>(matrix.weight) + (n + std::min(o, n_out - 1)) * n_byte;
            for (int64_t r = 0; r < TILE; ++r)
                x[r] = reinterpret_cast<const char*>(rows.numbers + (m + std::min(r, n_row - 1)) * n_in);
            square(n_row, n_part > 0, w, x, n_byte, values);
        } else
#endif
        {
            const T* w = static_cast<const T*>(matrix.weight) + n * n_in;
            const Factor<T>* x = rows.numbers + m * n_in;
            int64_t o = 0;
            if constexpr (OUTPUTS == 2)
                if (n_row == TILE && n_out == 2) dots_of_two<TILE>(w, x, n_in, values), o = 2;
            for (; o < n_out; ++o) {
                float totals[TILE];
                if (n_row == TILE) dots<TILE>(w + o * n_in, x, n_in, totals);
                else
                    for (int64_t r = 0; r < n_row; ++r) dots<1>(w + o * n_in, x + r * n_in, n_in, totals + r);
                for (int64_t r = 0; r < n_row; ++r) values[r * OUTPUTS + o] = totals[r];
            }
        }
    }
    if (matrix.bias)
        for (int64_t r = 0; r < n_row; ++r)
            for (int64_t o = 0; o < n_out; ++o) values[r * width + o] += number(matrix.bias[n + o]);
}

// Calls work(tile) for every tile. Each thread of the team takes its share of the outputs and then waits for the others.
template <typename T, typename Work>
void by_tiles(const Matrix<T>& matrix, int64_t n_row, const Work& work) {
    const bool fetches = n_row > 2;  // fewer rows take less time than their weights take to arrive
    const int64_t n_out = matrix.n_out, width = in_blocks(matrix) ? BLOCK : OUTPUTS;
    const int64_t block = fetches ? IN_CACHE : width, n_turn = (n_row + TILE - 1) / TILE, in_turn = block / width;
#pragma omp for schedule(static)
    for (int64_t start = 0; start < n_out; start += block)
        for (int64_t turn = 0; turn < n_turn; ++turn)
            for (int64_t i = 0; i < in_turn && start + i * width < n_out; ++i) {
                const int64_t m = turn * TILE, n = start + i * width;
                const Tile tile{m, std::min(TILE, n_row - m), n, std::min(width, n_out - n), width,
                                start + block, turn * in_turn + i, fetches ? n_turn * in_turn : 0};
                work(tile);
            }
}

// The values of a tile are written to y (n_row, n_out), or added to y with `added`.
template <typename T>
void put(const Tile& tile, const float* values, T* y, int64_t n_out, bool added) {
    for (int64_t r = 0; r < tile.n_row; ++r) {
        T* place = y + (tile.m + r) * n_out + tile.n;
        int64_t o = 0;
        if (OUTPUTS > 1)
            for (; o + OUTPUTS <= tile.n_out; o += OUTPUTS) {
                const auto value = numbers<OUTPUTS>(values + r * tile.width + o);
                store<OUTPUTS>(place + o, added ? numbers<OUTPUTS>(place + o) + rounded<T, OUTPUTS>(value) : value);
            }
        for (; o < tile.n_out; ++o) {
            const float value = values[r * tile.width + o];
            store(place + o, added ? number(place[o]) + rounded<T>(value) : value);
        }
    }
}

// The product of x (n_row, n_in) and the weight is written to y (n_row, n_out), or added to y with `added`. Each thread of
// the team computes its share of y and then waits for the others.
template <typename T>
void linear_by_team(const Matrix<T>& matrix, const T* x, T* y, int64_t n_row, Rows<T>& shared, bool added = false) {
    Rows<T> own;
    const Rows<T>& rows = rows_for(matrix, x, n_row, own, shared);
    by_tiles(matrix, n_row, [&](const Tile& tile) {
        float values[TILE * WIDEST];
        products(matrix, rows, tile, values);
        put(tile, values, y, matrix.n_out, added);
    });
}

template <typename T>
void linear(const Matrix<T>& matrix, const T* x, T* y, int64_t n_row) {
    Rows<T> shared;
#pragma omp parallel
    linear_by_team(matrix, x, y, n_row, shared);
}

template <typename T>
void rms_norm(const T* x, const float* weight, T* y, int64_t n_row, int64_t n, float epsilon) {
    for (int64_t m = 0; m < n_row; ++m) {
        const std::vector<float> row = copied<float>(x + m * n, n);
        float factor = 1 / std::sqrt(dot(row.data(), row.data(), n) / n + epsilon);
        for (int64_t k = 0; k < n; ++k) store(y + m * n + k, row[k] * factor * weight[k]);
    }
}

// The norm of x is written to `shared` by the team if the rows are many, else to `own` by each thread. Returns where it is.
template <typename T>
T* norm_by_team(const T* x, const float* weight, T* own, T* shared, int64_t n_row, int64_t n, float epsilon) {
    if (n_row <= TILE) return rms_norm(x, weight, own, n_row, n, epsilon), own;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < n_row; ++m) rms_norm(x + m * n, weight, shared + m * n, 1, n, epsilon);
    return shared;
}

// Prepare a query or key of one head (D): RMS-normalise it unless epsilon is negative, multiply it by the norm's weight (D)
// unless this is null, scale it, and rotate it by the angles of its position.
template <typename T>
void placed(const T* x, int64_t d, float epsilon, const float* norm, float scale, const float* turn, float* head) {
    for (int64_t k = 0; k < d; ++k) head[k] = number(x[k]);
    float factor = epsilon < 0 ? scale : scale / std::sqrt(dot(head, head, d) / d + epsilon);
    for (int64_t k = 0; k < d; ++k) head[k] *= norm ? factor * norm[k] : factor;
    if (turn) {
        float *left = head, *right = left + d / 2;
        for (int64_t k = 0; k < d / 2; ++k) {
            const float before = left[k];
            left[k] = before * turn[k] + right[k] * turn[d + k];
            right[k] = right[k] * turn[d / 2 + k] + before * turn[d + d / 2 + k];
        }
    }
}

// How a layer's queries and keys become weights (attention/modifiers.py). window: the number of keys that a query sees, or 0
// for all up to its own. cap: of the scores, or 0. slopes: ALiBi's, (H), or null. sinks: the logits of the attention sinks,
// (H), or null. query_norm, key_norm: the learned weights of QK-norm, (D), or null.
struct Scoring {
    int64_t window;
    const float *slopes, *sinks;
    float cap;
    const float *query_norm, *key_norm;
};

// e^x for x <= 0, accurate to the last places of fp32 (Cody and Waite's range reduction, a polynomial of degree 6).
Floats exponential(Floats x) {
    x = x < -87.0f ? Floats{} - 87 : x;  // NaN stays NaN
    const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // the nearest integer
    const Floats turns = __builtin_convertvector(n, Floats);
    Floats r = x - turns * 0.693359375f;
    keep_order(r);
    r += turns * 2.12194440e-4f;
    Floats y = Floats{} + 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + c;
    return Floats(Ints(y) + (n << 23));
}

// The n numbers from `place` on will be read soon.
template <typename T>
void fetch(const T* place, int64_t n) {
    for (int64_t k = 0; k < n; k += 64 / sizeof(T)) __builtin_prefetch(place + k);
}

// The sum of n rows (n, d), each times its weight, is written to `total` (d). Meanwhile the n rows at `next` are fetched.
template <typename T>
void weighted_sum(const float* weights, const T* rows, int64_t n, int64_t d, const T* next, float* total) {
    constexpr int64_t N = 64 / LANES;
    int64_t k = 0;
    for (; k + 64 <= d; k += 64) {
        Floats sums[N] = {};
        for (int64_t s = 0; s < n; ++s) {
            fetch(next + s * d + k, 64);
#pragma GCC unroll 16
            for (int64_t i = 0; i < N; ++i) sums[i] += weights[s] * vector(rows + s * d + k + i * LANES);
        }
        std::memcpy(total + k, sums, sizeof sums);
    }
    for (; k < d; ++k) {
        total[k] = 0;
        for (int64_t s = 0; s < n; ++s) total[k] += weights[s] * number(rows[s * d + k]);
    }
}

// Attention of one new token for each of B texts: qkv (B, (H + 2G) D) -> out (B, H D). Text b has lengths[b] tokens so far;
// they fill the first places of its cache, keys[b] and values[b] (G, capacity, D). The new key and value are appended.
// turns (capacity, 2, D): the angles of each position, or null.
template <typename T>
void attend_by_team(
    const T* qkv, T* const* keys, T* const* values, const float* turns, T* out, int64_t n_batch, int64_t n_head,
    int64_t n_kv_head, int64_t d, int64_t capacity, const int64_t* lengths, float epsilon, float scale,
    const Scoring& scoring) {
    const int64_t shared = n_head / n_kv_head, width = (n_head + 2 * n_kv_head) * d, n_work = n_batch * n_kv_head;
    std::vector<float> own(d), query(d), weights(capacity + 1 + LANES), retrieved(d);
#pragma omp for schedule(static)
    for (int64_t each = 0; each < n_work; ++each) {
        const int64_t b = each / n_kv_head, g = each % n_kv_head, length = lengths[b];
        const int64_t first = scoring.window ? std::max<int64_t>(0, length + 1 - scoring.window) : 0;  // visible key
        const float* turn = turns ? turns + length * 2 * d : nullptr;
        const T* next_key = keys[(each + 1) % n_work / n_kv_head] + (each + 1) % n_kv_head * capacity * d;
        const T* new_key = qkv + b * width + (n_head + g) * d;
        T *key = keys[b] + g * capacity * d, *value = values[b] + g * capacity * d;
        placed(new_key, d, epsilon, scoring.key_norm, 1, turn, own.data());
        for (int64_t k = 0; k < d; ++k) store(key + length * d + k, own[k]);
        std::memcpy(value + length * d, new_key + n_kv_head * d, d * sizeof(T));
        const int64_t n_weight = length + 1 + LANES;  // whole vectors, from any first key on
        for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
            placed(qkv + b * width + h * d, d, epsilon, scoring.query_norm, scale, turn, query.data());
            float largest = scoring.sinks ? scoring.sinks[h] : -INFINITY, total = 0;
            for (int64_t s = first; s <= length; ++s) {
                fetch(value + s * d, d);
                weights[s] = dot(key + s * d, query.data(), d);
                if (scoring.cap > 0) weights[s] = scoring.cap * std::tanh(weights[s] / scoring.cap);
                if (scoring.slopes) weights[s] -= scoring.slopes[h] * float(length - s);
                largest = std::max(largest, weights[s]);
            }
            if (scoring.sinks) total = std::exp(scoring.sinks[h] - largest);
            for (int64_t s = length + 1; s < n_weight; ++s) weights[s] = -INFINITY;
            for (int64_t s = first; s <= length; s += LANES) {
                const Floats shares = exponential(vector(&weights[s]) - largest);
                std::memcpy(&weights[s], &shares, sizeof shares);
                total += sum<LANES>(shares);
            }
            weighted_sum(&weights[first], value + first * d, length + 1 - first, d, next_key + first * d, retrieved.data());
            for (int64_t k = 0; k < d; ++k) store(out + (b * n_head + h) * d + k, retrieved[k] / total);
        }
    }
}

enum Activation : int64_t { GELU, RELU2, SWIGLU, GELU_EXACT };  // in the order of ACTIVATIONS in packed_model.py

struct Shape {
    int64_t n_layer, n_row, d_model, d_mlp, n_head, n_kv_head, d_head, capacity, activation, value_residual, n_mixed,
        parallel_residual;
    const int64_t* lengths;  // (n_row): tokens of each text so far
    float norm_epsilon, qk_epsilon, scale;
};

template <typename T>
struct Layer {
    const float* attention_norm;
    Matrix<T> project, output;
    const float* mlp_norm;
    Matrix<T> gate, up, down;  // gate is used by SwiGLU alone
    Matrix<T> head_gate;       // (H or H D, d_model) with head gates; weight is null without
    const float* own_share;    // (H): the share of its own value that a head's vector loses; null: none
    float first_share;         // with value_residual: the share of the first layer's values in this layer's values
    Scoring scoring;
    const float* taps;         // (H + 2G, D, n_mixed), with a convolution
    T* const* projected;       // of each text (H + 2G, capacity, D): queries, keys and values before the convolution
};

// Exclusive attention: in each row of `retrieved` (n_row, H D), the vector z of head h loses share[h] of its component along
// the token's own value v, which stands in qkv (n_row, (H + 2G) D). As `without_own_value` in attention/multihead.py.
template <typename T>
void exclude_by_team(const T* qkv, const float* share, T* retrieved, const Shape& shape) {
    const int64_t d = shape.d_head, n_head = shape.n_head, in_group = n_head / shape.n_kv_head;
#pragma omp for schedule(static)
    for (int64_t each = 0; each < shape.n_row * n_head; ++each) {
        const int64_t m = each / n_head, h = each % n_head, row = m * (n_head + 2 * shape.n_kv_head);
        const std::vector<float> v = copied<float>(qkv + (row + n_head + shape.n_kv_head + h / in_group) * d, d);
        const std::vector<float> z = copied<float>(retrieved + each * d, d);
        const float along = dot(z.data(), v.data(), d) / (dot(v.data(), v.data(), d) + OWN_VALUE_EPSILON) * share[h];
        for (int64_t k = 0; k < d; ++k) store(retrieved + each * d + k, z[k] - along * v[k]);
    }
}

// Head gates 2·sigmoid(gate x): x (n_row, d_model) is the normed input of the block. Each gate multiplies the channels of
// `retrieved` (n_row, H D) that it belongs to: those of a head, or one. Rounds where MultiHeadAttention.finish does.
template <typename T>
void gate_heads_by_team(
    const Matrix<T>& gate, const T* x, T* retrieved, int64_t n_row, int64_t d_attended, Rows<T>& shared) {
    Rows<T> own;
    const Rows<T>& rows = rows_for(gate, x, n_row, own, shared);
    const int64_t n_channel = d_attended / gate.n_out;
    by_tiles(gate, n_row, [&](const Tile& tile) {
        float logits[TILE * WIDEST];
        products(gate, rows, tile, logits);
        for (int64_t r = 0; r < tile.n_row; ++r)
            for (int64_t o = 0; o < tile.n_out; ++o) {
                const float logit = rounded<T>(logits[r * tile.width + o]), open = 2 * rounded<T>(1 / (1 + std::exp(-logit)));
                T* z = retrieved + (tile.m + r) * d_attended + (tile.n + o) * n_channel;
                for (int64_t k = 0; k < n_channel; ++k) store(z + k, number(z[k]) * open);
            }
    });
}

// Value residuals. In qkv (n_row, (H + 2G) D) the values come after the queries and keys. The first layer's values are copied
// to `first` (n_row, G D). Every later layer mixes its share of `first` into its own values.
template <typename T>
void mix_values_by_team(T* qkv, T* first, const Shape& shape, bool is_first, float share) {
    const int64_t n_value = shape.n_kv_head * shape.d_head, before = shape.n_head * shape.d_head + n_value;
    share = rounded<T>(share);
#pragma omp for schedule(static)
    for (int64_t m = 0; m < shape.n_row; ++m) {
        T *value = qkv + m * (before + n_value) + before, *kept = first + m * n_value;
        for (int64_t k = 0; k < n_value; ++k) {
            const float own = number(value[k]), more = number(kept[k]) - own;
            if (is_first) kept[k] = value[k];
            else store(value + k, share < 0.5f ? own + share * more : number(kept[k]) - (1 - share) * more);  // as torch.lerp
        }
    }
}

// Value embeddings: `added` (n_row, G D) is added to the values in qkv (n_row, (H + 2G) D).
template <typename T>
void add_to_values_by_team(T* qkv, const T* added, const Shape& shape) {
    const int64_t n_value = shape.n_kv_head * shape.d_head, before = shape.n_head * shape.d_head + n_value;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < shape.n_row; ++m)
        for (int64_t k = 0; k < n_value; ++k) {
            T* value = qkv + m * (before + n_value) + before + k;
            store(value, number(*value) + number(added[m * n_value + k]));
        }
}

// The convolution over tokens (attention/multihead.py) of qkv (n_row, (H + 2G) D). Row b of qkv is also kept in projected[b]
// (H + 2G, capacity, D), after the lengths[b] earlier tokens.
template <typename T>
void convolve_by_team(
    T* qkv, T* const* projected, const float* taps, int64_t n_row, int64_t n_heads, int64_t d, int64_t capacity,
    const int64_t* lengths, int64_t n_mixed) {
#pragma omp for schedule(static)
    for (int64_t each = 0; each < n_row * n_heads; ++each) {
        const int64_t length = lengths[each / n_heads];
        T *x = qkv + each * d, *kept = projected[each / n_heads] + (each % n_heads * capacity + length) * d;
        const float* weights = taps + each % n_heads * d * n_mixed;
        std::memcpy(kept, x, d * sizeof(T));
        for (int64_t k = 0; k < d; ++k) {
            float y = number(x[k]);
            for (int64_t i = 0; i < n_mixed; ++i) {  // zeros come before the first token
                float earlier = i <= length ? number(kept[k - i * d]) : 0;
                y = rounded<T>(y + rounded<T>(earlier * rounded<T>(weights[k * n_mixed + i])));
            }
            store(x + k, y);
        }
    }
}

// What goes into `down` is written over n numbers of `ups`, whole vectors; SwiGLU alone reads `gates`.
template <typename T>
void activate(int64_t activation, float* ups, const float* gates, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        Floats up = rounded<T, LANES>(vector(ups + i));
        if (activation == SWIGLU) {
            const Floats gate = rounded<T, LANES>(vector(gates + i)), e = exponential(gate < 0 ? gate : -gate);
            up *= rounded<T, LANES>(gate * (gate < 0 ? e : Floats{} + 1) / (1 + e));
        } else if (activation == RELU2) up = up < 0 ? Floats{} : up * up;
        else
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const float x = up[lane];
                up[lane] = activation == GELU_EXACT ? 0.5f * x * std::erfc(-0.7071067812f * x)
                                                    : 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
            }
        std::memcpy(ups + i, &up, sizeof up);
    }
}

// All blocks and the final norm for one new token of each of n_row texts: x (n_row, d_model) -> y. x is overwritten. keys,
// values: of layer l and text b at l * n_row + b, as in attend_by_team. added (n_layer, n_row, G D): what value embeddings add to the values, or null. Results are rounded to T at the
// points where the blocks of model/gpt.py round. One team of threads computes everything: with int8 weights, starting a team
// for each operation from Python took a third of the time of a token.
template <typename T>
void decode(
    const Layer<T>* layers, const float* final_norm, T* const* keys, T* const* values, const float* turns, const T* added,
    T* x, T* y, const Shape& shape) {
    const int64_t n_row = shape.n_row, d_model = shape.d_model, d_attended = shape.n_head * shape.d_head;
    std::vector<T> qkv(n_row * (d_attended + 2 * shape.n_kv_head * shape.d_head)), retrieved(n_row * d_attended);
    std::vector<T> wide(n_row * shape.d_mlp), first_value(n_row * shape.n_kv_head * shape.d_head);
    std::vector<T> all_normed(n_row * d_model), all_mlp_normed(n_row * d_model);
    Rows<T> shared;
#pragma omp parallel
    {
        std::vector<T> own_normed(std::min(TILE, n_row) * d_model), own_mlp_normed(std::min(TILE, n_row) * d_model);
        const T *normed, *mlp_normed;
        Rows<T> own;
        for (int64_t l = 0; l < shape.n_layer; ++l) {
            const Layer<T>& layer = layers[l];
            const auto norm_for_mlp = [&] {
                mlp_normed = norm_by_team(
                    x, layer.mlp_norm, own_mlp_normed.data(), all_mlp_normed.data(), n_row, d_model, shape.norm_epsilon);
            };
            normed = norm_by_team(
                x, layer.attention_norm, own_normed.data(), all_normed.data(), n_row, d_model, shape.norm_epsilon);
            if (shape.parallel_residual) norm_for_mlp();
            linear_by_team(layer.project, normed, qkv.data(), n_row, shared);
            if (shape.value_residual) mix_values_by_team(qkv.data(), first_value.data(), shape, l == 0, layer.first_share);
            if (added) add_to_values_by_team(qkv.data(), added + l * n_row * shape.n_kv_head * shape.d_head, shape);
            if (shape.n_mixed)
                convolve_by_team(
                    qkv.data(), layer.projected, layer.taps, n_row, shape.n_head + 2 * shape.n_kv_head, shape.d_head,
                    shape.capacity, shape.lengths, shape.n_mixed);
            attend_by_team(
                qkv.data(), keys + l * n_row, values + l * n_row, turns, retrieved.data(), n_row, shape.n_head,
                shape.n_kv_head, shape.d_head, shape.capacity, shape.lengths, shape.qk_epsilon, shape.scale, layer.scoring);
            if (layer.own_share) exclude_by_team(qkv.data(), layer.own_share, retrieved.data(), shape);
            if (layer.head_gate.weight) gate_heads_by_team(layer.head_gate, normed, retrieved.data(), n_row, d_attended, shared);
            linear_by_team(layer.output, retrieved.data(), x, n_row, shared, true);
            if (!shape.parallel_residual) norm_for_mlp();
            const Rows<T>& rows = rows_for(layer.up, mlp_normed, n_row, own, shared);
            by_tiles(layer.up, n_row, [&](const Tile& tile) {
                float gates[TILE * WIDEST] = {}, ups[TILE * WIDEST] = {};
                if (shape.activation == SWIGLU) products(layer.gate, rows, tile, gates);
                products(layer.up, rows, tile, ups);
                activate<T>(shape.activation, ups, gates, tile.n_row * tile.width);
                put(tile, ups, wide.data(), shape.d_mlp, false);
            });
            linear_by_team(layer.down, wide.data(), x, n_row, shared, true);
        }
#pragma omp single
        rms_norm(x, final_norm, y, n_row, d_model, shape.norm_epsilon);
    }
}

// The parts of `first`, of n numbers each, that belong to each of n_batch texts.
template <typename T>
std::vector<T*> parts(T* first, int64_t n_batch, int64_t n) {
    std::vector<T*> each;
    for (int64_t b = 0; b < n_batch; ++b) each.push_back(first + b * n);
    return each;
}

}  // namespace

// The functions that Python calls. In attend and convolve, all texts have the same length.
#define FOR_TYPE(T, NAME)                                                                                                  \
    extern "C" void linear_##NAME(const Matrix<T>* matrix, const T* x, T* y, int64_t n_row) {                              \
        linear(*matrix, x, y, n_row);                                                                                      \
    }                                                                                                                      \
    extern "C" void rms_norm_##NAME(const T* x, const float* weight, T* y, int64_t n_row, int64_t n, float epsilon) {      \
        rms_norm(x, weight, y, n_row, n, epsilon);                                                                         \
    }                                                                                                                      \
    extern "C" void attend_##NAME(                                                                                         \
        const T* qkv, T* keys, T* values, const float* turns, T* out, int64_t n_batch, int64_t n_head, int64_t n_kv_head,  \
        int64_t d, int64_t capacity, int64_t length, float epsilon, float scale, const Scoring* scoring) {                 \
        const std::vector<T*> each_keys = parts(keys, n_batch, n_kv_head * capacity * d);                                  \
        const std::vector<T*> each_values = parts(values, n_batch, n_kv_head * capacity * d);                              \
        const std::vector<int64_t> lengths(n_batch, length);                                                               \
        _Pragma("omp parallel")                                                                                            \
        attend_by_team(                                                                                                    \
            qkv, each_keys.data(), each_values.data(), turns, out, n_batch, n_head, n_kv_head, d, capacity, lengths.data(),\
            epsilon, scale, *scoring);                                                                                     \
    }                                                                                                                      \
    extern "C" void convolve_##NAME(                                                                                       \
        T* qkv, T* projected, const float* taps, int64_t n_row, int64_t n_heads, int64_t d, int64_t capacity,              \
        int64_t length, int64_t n_mixed) {                                                                                 \
        const std::vector<T*> each = parts(projected, n_row, n_heads * capacity * d);                                      \
        const std::vector<int64_t> lengths(n_row, length);                                                                 \
        _Pragma("omp parallel")                                                                                            \
        convolve_by_team(qkv, each.data(), taps, n_row, n_heads, d, capacity, lengths.data(), n_mixed);                    \
    }                                                                                                                      \
    extern "C" void decode_##NAME(                                                                                         \
        const Layer<T>* layers, const float* final_norm, T* const* keys, T* const* values, const float* turns,             \
        const T* added, T* x, T* y, const Shape* shape) {                                                                  \
        decode(layers, final_norm, keys, values, turns, added, x, y, *shape);                                              \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(BF16, bf16)
