// A matrix product in fp32 on a CPU, by GCC's vectors of any width: C = A B, in the blocks of Goto and van de Geijn (2008,
// "Anatomy of high-performance matrix multiplication"). Its readable twin is torch.mm.
//
// A (n_row, depth) and B (depth, n_column) are read by any two strides, so that a transposed matrix needs no copy. Blocks of both
// are packed: the numbers of ROWS rows of A, or of COLUMNS columns of B, that have the same k lie side by side. A packed block of
// A stays in a core's L2 cache, and B's in the cache that all cores share. ROWS x COLUMNS sums stay in registers for DEPTH steps.
// So C, which is the largest in most products of training, is read and written once where depth <= DEPTH; more rounds over C cost
// more than what smaller blocks would save. Each number is summed in the same order whatever the number of threads is.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8, ROWS = 6;
#else
constexpr int64_t LANES = 4, ROWS = 6;
#endif
constexpr int64_t COLUMNS = 2 * LANES;
constexpr int64_t DEPTH = 768, MOST_ROWS = 48, MOST_COLUMNS = 768;  // of a block: multiples of ROWS and COLUMNS
constexpr std::align_val_t ALIGNMENT{64};
using Floats = float __attribute__((vector_size(4 * LANES)));
using Anywhere = float __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // at any address

Floats load(const float* x) { return *(const Anywhere*)x; }
void store(float* place, Floats x) { *(Anywhere*)place = x; }
int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A thread's own memory for packed blocks, kept from call to call: new memory would cost a tenth of a product's time.
template <int64_t LINES>
float* packed_block() {
    struct Free {
        void operator()(float* numbers) const { operator delete[](numbers, ALIGNMENT); }
    };
    thread_local const std::unique_ptr<float[], Free> kept((float*)operator new[](LINES * DEPTH * sizeof(float), ALIGNMENT));
    return kept.get();
}

// The first n lines of a matrix, of `depth` numbers each, in groups of WIDTH lines; zeros fill the last group. The lines of A are
// its rows, those of B its columns.
template <int64_t WIDTH>
void pack(const float* x, int64_t line_step, int64_t k_step, int64_t n, int64_t depth, float* packed) {
    constexpr int64_t AT_ONCE = 16;  // of depth: what one cache line holds of a line whose numbers lie side by side
    for (int64_t first = 0; first < n; first += WIDTH, packed += WIDTH * depth, x += WIDTH * line_step) {
        const int64_t width = std::min(WIDTH, n - first);
        if (line_step == 1 && width == WIDTH)
            for (int64_t k = 0; k < depth; ++k)
                for (int64_t line = 0; line < WIDTH; ++line) packed[k * WIDTH + line] = x[line + k * k_step];
        else
            for (int64_t start = 0; start < depth; start += AT_ONCE)
                for (int64_t line = 0; line < WIDTH; ++line)
                    for (int64_t k = start; k < std::min(depth, start + AT_ONCE); ++k)
                        packed[k * WIDTH + line] = line < width ? x[line * line_step + k * k_step] : 0;
    }
}

// `rows` x `columns` numbers of C = (or +=, with `add`) the product of a group of A and a group of B.
void tile(const float* a, const float* b, int64_t depth, float* c, int64_t c_step, int64_t rows, int64_t columns, bool add) {
    Floats sums[ROWS][2] = {};
    for (int64_t k = 0; k < depth; ++k, a += ROWS, b += COLUMNS) {
        const Floats left = *(const Floats*)b, right = *(const Floats*)(b + LANES);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; ++m) sums[m][0] += a[m] * left, sums[m][1] += a[m] * right;
    }
    if (rows == ROWS && columns == COLUMNS) {
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; ++m)
            for (int n = 0; n < 2; ++n) {
                float* place = c + m * c_step + n * LANES;
                store(place, add ? load(place) + sums[m][n] : sums[m][n]);
            }
        return;
    }
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < columns; ++n) {
            const float sum = sums[m][n / LANES][n % LANES];
            c[m * c_step + n] = add ? c[m * c_step + n] + sum : sum;
        }
}

}  // namespace

// strides: A's of a row and of k, B's of k and of a column. C (n_row, n_column) lies row by row. No size is 0.
extern "C" void product(
    const float* a, const float* b, float* c, const int64_t* strides, int64_t n_row, int64_t n_column, int64_t depth) {
    const int64_t a_row = strides[0], a_k = strides[1], b_k = strides[2], b_column = strides[3];
    const int64_t of_thread = up_to((n_row + omp_get_max_threads() - 1) / omp_get_max_threads(), ROWS);
    const int64_t tallest = std::min(of_thread, MOST_ROWS);
    float* packed_b = packed_block<MOST_COLUMNS>();
#pragma omp parallel
    {
        float* packed_a = packed_block<MOST_ROWS>();
        for (int64_t column = 0; column < n_column; column += MOST_COLUMNS)
            for (int64_t k = 0; k < depth; k += DEPTH) {
                const int64_t d = std::min(DEPTH, depth - k), columns = std::min(MOST_COLUMNS, n_column - column);
                const float* b_block = b + k * b_k + column * b_column;
#pragma omp for schedule(dynamic)
                for (int64_t n = 0; n < columns; n += COLUMNS)
                    pack<COLUMNS>(b_block + n * b_column, b_column, b_k, std::min(COLUMNS, columns - n), d, packed_b + n * d);
#pragma omp for schedule(dynamic)
                for (int64_t row = 0; row < n_row; row += tallest) {
                    const int64_t rows = std::min(tallest, n_row - row);
                    pack<ROWS>(a + row * a_row + k * a_k, a_row, a_k, rows, d, packed_a);
                    for (int64_t n = 0; n < columns; n += COLUMNS)
                        for (int64_t m = 0; m < rows; m += ROWS)
                            tile(packed_a + m * d, packed_b + n * d, d, c + (row + m) * n_column + column + n, n_column,
                                 std::min(ROWS, rows - m), std::min(COLUMNS, columns - n), k > 0);
                }
            }
    }
}
