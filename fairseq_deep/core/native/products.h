// Products of few rows by a weight in panels, in fp32 or int8.
//
//     y = act(x W^T + b) * gate * scale + residual
//
// A panel holds the weights of PANEL outputs, input by input, so that a tile of ROWS x PANEL sums stays in registers while
// the weights are read once. In int8, GROUP inputs of an output lie together, as the processor's products want them.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr int VECTORS = 2;
constexpr int PANEL = VECTORS * LANES;
constexpr int ROWS = WIDE ? 12 : 6;

#if (WIDE && defined(__AVX512VNNI__)) || (!WIDE && defined(__AVXVNNI__))
#define HAS_VNNI 1
typedef uint8_t Input;  // x_q + OFFSET: the instruction takes unsigned by signed
typedef int8_t Weight;
constexpr int GROUP = 4, OFFSET = 128;
#else
#define HAS_VNNI 0
typedef int16_t Input;  // pairs of products in 32 bits, so nothing overflows
typedef int16_t Weight;
constexpr int GROUP = 2, OFFSET = 0;
#endif
constexpr float STEPS = 127;

struct Linear {
    int64_t outputs, inputs;
    int64_t kind;           // 0: fp32, 1: int8
    const void* weight;     // in panels
    const float* bias;      // null for none
    const float* scales;    // int8: of each output, a multiple of PANEL entries
    const int32_t* excess;  // int8: what OFFSET adds to the sum of each output
};

enum Activation { NO_ACTIVATION, RELU, SWISH };

struct Ending {  // what follows a product
    Activation activation;
    const float* added;           // rows x outputs, a residual; null for none
    const float* gate = nullptr;  // rows x outputs, of a gated network; null for none
    float scale = 1;              // of the residual connection's branch
};

constexpr int64_t AHEAD_BYTES = 8192;  // the processor itself fetches weights ahead, but not beyond a page of 4,096 bytes

// Weights for all rows of a tile: GCC would read them from memory again for each row. Later ones are fetched meanwhile.
template <class V>
static inline V read_weights(const void* from) {
    V weights = *(const V*)from;
    asm("" : "+v"(weights));  // not folded into an instruction
    __builtin_prefetch((const char*)from + AHEAD_BYTES);
    return weights;
}

static inline int64_t panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
static inline int64_t groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

static inline void finish(Vec value, const float* bias, const Ending& ending, int64_t place, float* y, int64_t width) {
    if (width <= 0) return;
    if (bias) value += load_up_to(bias, width);
    if (ending.activation == RELU) value = value <= 0 ? Vec{} : value;  // NaN stays
    if (ending.activation == SWISH) value *= sigmoid(value);
    if (ending.gate) value *= load_up_to(ending.gate + place, width);
    if (ending.added) value = value * ending.scale + load_up_to(ending.added + place, width);
    store_up_to(y + place, value, width);
}

template <int R>
static void tile(const Linear& linear, const float* x, int64_t panel, int64_t row, const Ending& ending, float* y) {
    const float* weight = (const float*)linear.weight + panel * linear.inputs * PANEL;
    Vec sums[R][VECTORS] = {};
    const int64_t inputs = linear.inputs;
    x += row * inputs;
    for (int64_t k = 0; k < inputs; k++) {
        Vec w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = read_weights<Vec>(weight + k * PANEL + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] += x[r * inputs + k] * w[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) {
            int64_t output = panel * PANEL + v * LANES;
            const float* bias = linear.bias ? linear.bias + output : nullptr;
            finish(sums[r][v], bias, ending, (row + r) * linear.outputs + output, y, linear.outputs - output);
        }
}

static inline IntVec accumulate(IntVec sums, const Input* x, IntVec w) {
    int32_t together;
    memcpy(&together, x, 4);
#if HAS_VNNI && WIDE
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(together), (__m512i)w);
#elif HAS_VNNI
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, _mm256_set1_epi32(together), (__m256i)w);
#elif WIDE
    return sums + (IntVec)_mm512_madd_epi16(_mm512_set1_epi32(together), (__m512i)w);
#else
    return sums + (IntVec)_mm256_madd_epi16(_mm256_set1_epi32(together), (__m256i)w);
#endif
}

struct Quantised {  // rows of x as whole numbers, with the scale of each
    const Input* values;
    const float* scales;
};

template <int R>
static void tile(const Linear& linear, const Quantised& x, int64_t panel, int64_t row, const Ending& ending, float* y) {
    const int64_t steps = groups(linear.inputs);
    const Weight* weight = (const Weight*)linear.weight + panel * steps * GROUP * PANEL;
    const Input* values = x.values + row * steps * GROUP;
    IntVec sums[R][VECTORS] = {};
    for (int64_t k = 0; k < steps; k++) {
        IntVec w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = read_weights<IntVec>(weight + (k * PANEL + v * LANES) * GROUP);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = accumulate(sums[r][v], values + (r * steps + k) * GROUP, w[v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) {
            int64_t output = panel * PANEL + v * LANES;
            const float* bias = linear.bias ? linear.bias + output : nullptr;
            IntVec exact = sums[r][v] - *(const LooseIntVec*)(linear.excess + output);
            Vec value = __builtin_convertvector(exact, Vec) * load(linear.scales + output) * x.scales[row + r];
            finish(value, bias, ending, (row + r) * linear.outputs + output, y, linear.outputs - output);
        }
}

static inline void store_whole(Input* to, IntVec whole, int64_t count) {
    if (count < LANES) {
        for (int64_t lane = 0; lane < count; lane++) to[lane] = (Input)whole[lane];
        return;
    }
    typedef Input Narrow __attribute__((vector_size(LANES * sizeof(Input))));
    Narrow narrow = __builtin_convertvector(whole, Narrow);
    memcpy(to, &narrow, sizeof narrow);
}

// x_q = round(x / s) with s = max |x| / STEPS, a row at a time; a row that is not finite spoils no other.
static void quantise(const float* x, int64_t inputs, Input* values, float* scale) {
    Vec most = {}, bad = {};
    for (int64_t k = 0; k < inputs; k += LANES) {
        Vec value = load_up_to(x + k, inputs - k);
        most = larger(magnitude(value), most);
        bad += value * 0.0f;
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    const float factor = largest > 0 ? STEPS / largest : 0;
    *scale = largest / STEPS + sum(bad);
    for (int64_t k = 0; k < groups(inputs) * GROUP; k += LANES) {
        Vec shifted = (k < inputs ? load_up_to(x + k, inputs - k) : Vec{}) * factor + ROUNDING;
        store_whole(values + k, (IntVec)shifted - (IntVec)spread(ROUNDING) + OFFSET, groups(inputs) * GROUP - k);
    }
}

template <class X>
static void tiles(const Linear& linear, const X& x, int64_t panel, int64_t rows, const Ending& ending, float* y) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) tile<ROWS>(linear, x, panel, row, ending, y);
    switch (rows - row) {
#if WIDE
        case 11: tile<11>(linear, x, panel, row, ending, y); break;
        case 10: tile<10>(linear, x, panel, row, ending, y); break;
        case 9: tile<9>(linear, x, panel, row, ending, y); break;
        case 8: tile<8>(linear, x, panel, row, ending, y); break;
        case 7: tile<7>(linear, x, panel, row, ending, y); break;
        case 6: tile<6>(linear, x, panel, row, ending, y); break;
#endif
        case 5: tile<5>(linear, x, panel, row, ending, y); break;
        case 4: tile<4>(linear, x, panel, row, ending, y); break;
        case 3: tile<3>(linear, x, panel, row, ending, y); break;
        case 2: tile<2>(linear, x, panel, row, ending, y); break;
        case 1: tile<1>(linear, x, panel, row, ending, y); break;
    }
}

// y (rows x outputs) of x (rows x inputs), both without gaps.
static void multiply(const Linear& linear, const float* x, float* y, int64_t rows, int threads, Ending ending) {
    const int64_t count = panels(linear.outputs), width = groups(linear.inputs) * GROUP;
    static thread_local std::vector<Input> values;
    static thread_local std::vector<float> scales;
    Quantised quantised = {};
    if (linear.kind == 1) {
        values.resize(rows * width);
        scales.resize(rows);
        Input* to = values.data();
        float* scale = scales.data();
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t row = 0; row < rows; row++) quantise(x + row * linear.inputs, linear.inputs, to + row * width, scale + row);
        quantised = {to, scale};
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < count; panel++) {
        if (linear.kind == 1)
            tiles(linear, quantised, panel, rows, ending, y);
        else
            tiles(linear, x, panel, rows, ending, y);
    }
}
