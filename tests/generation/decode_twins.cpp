// The functions of decode.cpp against twins in float64: a program, so that an emulator of another processor can run it.

#include "decode.cpp"

#include <cstdio>
#include <random>

namespace {

using Doubles = std::vector<double>;
constexpr double EPSILON = 1e-6;
std::mt19937 generator{1};
bool failed = false;

template <typename T>
std::vector<T> draw(int64_t n, float spread = 1) {
    std::normal_distribution<float> normal;
    std::vector<T> drawn(n);
    for (T& each : drawn) store(&each, spread * normal(generator));
    return drawn;
}

template <typename T>
Doubles exact(const std::vector<T>& x) {
    Doubles copy;
    for (T each : x) copy.push_back(number(each));
    return copy;
}

// The largest error may be `roundings` units in the last place of the largest number, and what sums in fp32 add.
template <typename T>
void judge(const char* what, const std::vector<T>& ours, const Doubles& twin, double roundings = 1) {
    double largest = 0, error = 0;
    for (size_t k = 0; k < twin.size(); ++k) {
        largest = std::max(largest, std::fabs(twin[k]));
        error = std::max(error, std::isfinite(number(ours[k])) ? std::fabs(number(ours[k]) - twin[k]) : INFINITY);
    }
    const double allowed = largest * (1e-5 + (sizeof(T) == 2 ? roundings / 256 : 0));
    std::printf("%s %s: error %.2g, allowed %.2g\n", sizeof(T) == 2 ? "bf16" : "fp32", what, error, allowed);
    failed |= !(error <= allowed && largest > 0);
}

Doubles product_twin(const Doubles& w, const Doubles& x, const Doubles& bias, int64_t n_row, int64_t n_in, int64_t n_out) {
    Doubles y(n_row * n_out);
    for (int64_t m = 0; m < n_row; ++m)
        for (int64_t n = 0; n < n_out; ++n) {
            double total = bias.empty() ? 0 : bias[n];
            for (int64_t k = 0; k < n_in; ++k) total += w[n * n_in + k] * x[m * n_in + k];
            y[m * n_out + n] = total;
        }
    return y;
}

Doubles norm_twin(const double* x, const std::vector<float>& weight, int64_t n_row, int64_t n) {
    Doubles y(n_row * n);
    for (int64_t m = 0; m < n_row; ++m) {
        double squares = 0;
        for (int64_t k = 0; k < n; ++k) squares += x[m * n + k] * x[m * n + k];
        for (int64_t k = 0; k < n; ++k)
            y[m * n + k] = x[m * n + k] / std::sqrt(squares / n + EPSILON) * (weight.empty() ? 1 : weight[k]);
    }
    return y;
}

// Text b of `qkv` (B, (H + 2G) D) after the first `length` keys and values (B, G, capacity, D).
Doubles attend_twin(
    const Doubles& qkv, const Doubles& keys, const Doubles& values, const std::vector<float>& turn, int64_t n_batch,
    int64_t n_head, int64_t n_kv_head, int64_t d, int64_t capacity, int64_t length, double scale) {
    const auto placed_twin = [&](const double* x) {
        const Doubles head = norm_twin(x, {}, 1, d);
        Doubles turned(d);
        for (int64_t k = 0; k < d; ++k) turned[k] = head[k] * turn[k] + head[(k + d / 2) % d] * turn[d + k];
        return turned;
    };
    Doubles out(n_batch * n_head * d);
    for (int64_t b = 0; b < n_batch; ++b)
        for (int64_t h = 0; h < n_head; ++h) {
            const int64_t g = h / (n_head / n_kv_head);
            const double* row = &qkv[b * (n_head + 2 * n_kv_head) * d];
            const Doubles query = placed_twin(row + h * d), own = placed_twin(row + (n_head + g) * d);
            double total = 0;
            for (int64_t s = 0; s <= length; ++s) {
                const int64_t place = ((b * n_kv_head + g) * capacity + s) * d;
                const double* key = s < length ? &keys[place] : own.data();
                const double* value = s < length ? &values[place] : row + (n_head + n_kv_head + g) * d;
                double score = 0;
                for (int64_t k = 0; k < d; ++k) score += scale * query[k] * key[k];
                total += std::exp(score);
                for (int64_t k = 0; k < d; ++k) out[(b * n_head + h) * d + k] += std::exp(score) * value[k];
            }
            for (int64_t k = 0; k < d; ++k) out[(b * n_head + h) * d + k] /= total;
        }
    return out;
}

template <typename T>
Matrix<T> matrix_of(const std::vector<T>& weight, int64_t n_in, int64_t n_out) {
    return {weight.data(), nullptr, nullptr, nullptr, n_in, n_out, nullptr};
}

template <typename T>
void check_product(int64_t n_row, int64_t n_in, int64_t n_out, void (*linear)(const Matrix<T>*, const T*, T*, int64_t)) {
    const auto weight = draw<T>(n_in * n_out), x = draw<T>(n_row * n_in), bias = draw<T>(n_out);
    std::vector<T> y(n_row * n_out);
    const Matrix<T> matrix{weight.data(), nullptr, nullptr, bias.data(), n_in, n_out};
    linear(&matrix, x.data(), y.data(), n_row);
    judge("product", y, product_twin(exact(weight), exact(x), exact(bias), n_row, n_in, n_out));

    const int64_t n_block = (n_out + BLOCK - 1) / BLOCK, n_quad = quads(n_in);
    std::vector<int8_t> bytes(n_block * n_quad * BLOCK * 4);
    std::vector<int32_t> sums(n_out);
    const std::vector<float> scale(n_out, 0.01f);
    Doubles kept;
    for (int64_t k = 0; k < n_in * n_out; ++k) {
        const int64_t n = k / n_in, column = k % n_in;
        int8_t& byte = bytes[((n / BLOCK * n_quad + column / 4) * BLOCK + n % BLOCK) * 4 + column % 4];
        byte = int8_t(int64_t(generator() % 255) - 127);
        sums[n] += byte;
        kept.push_back(double(scale[0]) * byte);
    }
    const Matrix<T> int8{bytes.data(), scale.data(), sums.data(), nullptr, n_in, n_out};
    linear(&int8, x.data(), y.data(), n_row);
    const Doubles twin = product_twin(kept, exact(x), {}, n_row, n_in, n_out);
    const auto without_rounding = [&](double half_step, const Doubles& weights, const Doubles& twin) {
        Doubles ours = exact(y);
        for (size_t k = 0; k < ours.size(); ++k) {
            double reach = 0;  // what rounding x may do, none of which is larger than 4.5
            for (int64_t i = 0; i < n_in; ++i) reach += half_step * std::fabs(weights[k % n_out * n_in + i]);
            const double inside = std::min(std::fabs(ours[k] - twin[k]), reach);
            store(&y[k], float(ours[k] + (ours[k] < twin[k] ? inside : -inside)));
        }
    };
    without_rounding(4.5 / 32767 / 2, kept, twin);
    judge("int8 product", y, twin, 2);

    const int64_t n_group = groups(n_in);
    std::vector<uint8_t> halves(n_block * n_group * BLOCK * GROUP / 2, 0x88);  // zeros
    std::vector<BF16> group_scale(n_block * n_group * BLOCK);
    for (int64_t n = 0; n < n_out; ++n)
        for (int64_t k = 0; k < n_in; ++k) {
            const int64_t q = generator() % 16, group = n / BLOCK * n_group + k / GROUP, column = k % GROUP;
            uint8_t& byte = halves[((group * 4 + column / 8) * BLOCK + n % BLOCK) * 4 + column % 4];
            byte = column % 8 < 4 ? (byte & 0xf0) | q : (byte & 0xf) | q << 4;
            BF16& scale_of_group = group_scale[group * BLOCK + n % BLOCK];
            store(&scale_of_group, 0.125f);
            kept[n * n_in + k] = (q - 8) * 0.125;
        }
    const Matrix<T> int4{halves.data(), nullptr, nullptr, nullptr, n_in, n_out, group_scale.data()};
    linear(&int4, x.data(), y.data(), n_row);
    const Doubles twin_of_int4 = product_twin(kept, exact(x), {}, n_row, n_in, n_out);
    without_rounding(4.5 / 127 / 2, kept, twin_of_int4);
    judge("int4 product", y, twin_of_int4, 2);
}

template <typename T, typename Decode, typename Attend, typename Norm>
void check_blocks(int64_t n_row, int64_t d, int64_t n_kv_head, int64_t length, Decode decode, Attend attend, Norm rms_norm) {
    const int64_t n_head = 2 * n_kv_head, capacity = length + 3, wide = (n_head + 2 * n_kv_head) * d, n_mlp = 37;
    const int64_t n = n_head * d;  // d_model
    const auto turns = draw<float>(capacity * 2 * d), first = draw<float>(n), second = draw<float>(n), last = draw<float>(n);
    const auto project = draw<T>(wide * n, 0.1f), output = draw<T>(n * n, 0.1f), up = draw<T>(n_mlp * n, 0.1f);
    const auto down = draw<T>(n * n_mlp, 0.1f), x = draw<T>(n_row * n), qkv = draw<T>(n_row * wide);
    auto keys = draw<T>(n_row * n_kv_head * capacity * d), values = draw<T>(keys.size());
    const Doubles old_keys = exact(keys), old_values = exact(values);
    const float scale = 1 / std::sqrt(float(d));
    const std::vector<float> turn(&turns[length * 2 * d], &turns[(length + 1) * 2 * d]);
    const auto attended = [&](const Doubles& rows) {
        return attend_twin(rows, old_keys, old_values, turn, n_row, n_head, n_kv_head, d, capacity, length, scale);
    };
    std::vector<T> y(n_row * n);
    rms_norm(x.data(), first.data(), y.data(), n_row, n, EPSILON);
    judge("norm", y, norm_twin(exact(x).data(), first, n_row, n));
    const Scoring scoring{};
    attend(
        qkv.data(), keys.data(), values.data(), turns.data(), y.data(), n_row, n_head, n_kv_head, d, capacity, length, EPSILON,
        scale, &scoring);
    judge("attention", y, attended(exact(qkv)), 4);

    Layer<T> layer{};
    layer.attention_norm = first.data(), layer.mlp_norm = second.data();
    layer.project = matrix_of(project, n, wide), layer.output = matrix_of(output, n, n);
    layer.up = matrix_of(up, n, n_mlp), layer.down = matrix_of(down, n_mlp, n);
    Shape shape{};
    shape.n_layer = 1, shape.n_row = n_row, shape.d_model = n, shape.d_mlp = n_mlp, shape.n_head = n_head;
    shape.n_kv_head = n_kv_head, shape.d_head = d, shape.capacity = capacity;
    const std::vector<int64_t> lengths(n_row, length);
    shape.lengths = lengths.data();
    shape.activation = RELU2, shape.norm_epsilon = shape.qk_epsilon = EPSILON, shape.scale = scale;
    const auto each_keys = parts(keys.data(), n_row, n_kv_head * capacity * d);
    const auto each_values = parts(values.data(), n_row, n_kv_head * capacity * d);
    auto input = x;
    decode(
        &layer, last.data(), each_keys.data(), each_values.data(), turns.data(), (const T*)nullptr, input.data(), y.data(), &shape);
    Doubles twin = exact(x);
    const auto add = [&](const Doubles& more) {
        for (size_t k = 0; k < twin.size(); ++k) twin[k] += more[k];
    };
    const Doubles rows = product_twin(exact(project), norm_twin(twin.data(), first, n_row, n), {}, n_row, n, wide);
    add(product_twin(exact(output), attended(rows), {}, n_row, n, n));
    Doubles hidden = product_twin(exact(up), norm_twin(twin.data(), second, n_row, n), {}, n_row, n, n_mlp);
    for (double& each : hidden) each = each > 0 ? each * each : 0;
    add(product_twin(exact(down), hidden, {}, n_row, n_mlp, n));
    judge("block", y, norm_twin(twin.data(), last, n_row, n), 16);
}

}  // namespace

int main() {
    const int64_t products[][3] = {{1, 7, 3}, {3, 67, 13}, {1, 197, 11}, {8, 96, 5}, {1, 1031, 2}};
    for (const auto& [n_row, n_in, n_out] : products) {
        check_product<float>(n_row, n_in, n_out, linear_fp32);
        check_product<BF16>(n_row, n_in, n_out, linear_bf16);
    }
    const int64_t blocks[][4] = {{1, 6, 1, 0}, {3, 20, 2, 11}, {2, 64, 1, 37}};  // rows, D, G, tokens before
    for (const auto& [n_row, d, n_kv_head, length] : blocks) {
        check_blocks<float>(n_row, d, n_kv_head, length, decode_fp32, attend_fp32, rms_norm_fp32);
        check_blocks<BF16>(n_row, d, n_kv_head, length, decode_bf16, attend_bf16, rms_norm_bf16);
    }
    return failed;
}
