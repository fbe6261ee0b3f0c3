// A layer of the decoder at one position of each hypothesis, in one call. `steps.py` has the same structures.
//
//     post-norm  x = LN(x + F(x)),  pre-norm  x = x + F(LN(x)),  for self-attention, attention to the source and FFN
#include "attention.h"

struct Norm {
    int64_t kind;  // 0: none, 1: LayerNorm, 2: RMSNorm
    const float *weight, *bias;
    double eps;
};

struct Layer {
    int64_t pre_norm;
    Norm norms[3];
    Attention self, source;
    Linear fc1, fc2;  // with ReLU between them
};

static void normalise(const Norm& norm, const float* x, float* y, int64_t width) {
    float mean = 0, squares = 0;
    if (norm.kind == 1) {
        Vec total = {};
        for (int64_t k = 0; k < width; k += LANES) total += load_up_to(x + k, width - k);
        mean = sum(total) / width;
    }
    Vec total = {};
    for (int64_t k = 0; k < width; k += LANES) {
        Vec centred = load_up_to(x + k, width - k) - mean;
        for (int64_t lane = width - k; lane < LANES; lane++) centred[lane] = 0;
        total += centred * centred;
    }
    squares = sum(total) / width;
    const float factor = 1 / std::sqrt(squares + (float)norm.eps);
    for (int64_t k = 0; k < width; k += LANES) {
        Vec value = (load_up_to(x + k, width - k) - mean) * factor * load_up_to(norm.weight + k, width - k);
        if (norm.kind == 1) value += load_up_to(norm.bias + k, width - k);
        store_up_to(y + k, value, width - k);
    }
}

static const float* normalise_rows(const Norm& norm, const float* x, float* y, int64_t rows, int64_t width, int threads) {
    if (!norm.kind) return x;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) normalise(norm, x + row * width, y + row * width, width);
    return y;
}

struct Scratch {  // memory of a layer, kept by the thread
    std::vector<float> normed, wide, heads;
};

// A sub-layer with its norm and residual connection, from x to y, which may be the same.
template <class F>
static void connect(const Layer& layer, const Norm& norm, const Step& step, int64_t width, Scratch& scratch,
                    const float* x, float* y, F branch) {
    const int64_t rows = step.sentences * step.beam;
    const int threads = (int)step.threads;
    if (layer.pre_norm) {
        branch(normalise_rows(norm, x, scratch.normed.data(), rows, width, threads), x, y);
    } else {
        branch(x, x, y);
        normalise_rows(norm, y, y, rows, width, threads);
    }
}

extern "C" {

void layer_step(const Layer* of, const Step* at, const Keys* cache, const float* x, float* y) {
    const Layer& layer = *of;
    const Step& step = *at;
    const Keys& keys = *cache;
    const int64_t rows = step.sentences * step.beam, width = layer.fc2.outputs;
    const int threads = (int)step.threads;
    static thread_local Scratch scratch;
    scratch.normed.resize(rows * width);
    scratch.heads.resize(rows * layer.self.heads * layer.self.dim);
    scratch.wide.resize(rows * std::max(layer.self.input.outputs, layer.fc1.outputs));
    float *wide = scratch.wide.data(), *heads = scratch.heads.data();
    connect(layer, layer.norms[0], step, width, scratch, x, y, [&](const float* in, const float* residual, float* out) {
        multiply(layer.self.input, in, wide, rows, threads, {false, nullptr});
        attend_all(attend_target, step.sentences, layer.self, step, keys, wide, heads);
        multiply(layer.self.output, heads, out, rows, threads, {false, residual});
    });
    if (layer.source.heads)
        connect(layer, layer.norms[1], step, width, scratch, y, y, [&](const float* in, const float* residual, float* out) {
            multiply(layer.source.input, in, wide, rows, threads, {false, nullptr});
            attend_all(attend_source, keys.sources, layer.source, step, keys, wide, heads);
            multiply(layer.source.output, heads, out, rows, threads, {false, residual});
        });
    connect(layer, layer.norms[2], step, width, scratch, y, y, [&](const float* in, const float* residual, float* out) {
        multiply(layer.fc1, in, wide, rows, threads, {true, nullptr});
        multiply(layer.fc2, wide, out, rows, threads, {false, residual});
    });
}

void linear_product(const Linear* linear, const float* x, float* y, int64_t rows, int64_t threads) {
    multiply(*linear, x, y, rows, (int)threads, {false, nullptr});
}

// The slots that each hypothesis sees: where its mask (rows of `stride` floats) is 0. Returns the length, or -1 if the
// hypotheses do not all see the same number.
int64_t seen_slots(const float* mask, int64_t rows, int64_t stride, int64_t slots, int64_t length, int32_t* seen) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t found = 0;
        for (int64_t slot = 0; slot < slots; slot++)
            if (mask[row * stride + slot] == 0) {
                if (found == length) return -1;
                seen[row * length + found++] = (int32_t)slot;
            }
        if (found != length) return -1;
    }
    return length;
}

int64_t panel_width() { return PANEL; }
int64_t group_width() { return GROUP; }
int64_t has_vnni() { return HAS_VNNI; }

void pack_fp32(const float* weight, int64_t outputs, int64_t inputs, float* packed) {
    for (int64_t panel = 0; panel < panels(outputs); panel++)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t output = panel * PANEL + j;
                packed[(panel * inputs + k) * PANEL + j] = output < outputs ? weight[output * inputs + k] : 0;
            }
}

// Also fills `excess`, a multiple of PANEL entries.
void pack_int8(const int8_t* weight, int64_t outputs, int64_t inputs, Weight* packed, int32_t* excess) {
    const int64_t steps = groups(inputs);
    for (int64_t panel = 0; panel < panels(outputs); panel++)
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t output = panel * PANEL + j;
            int32_t total = 0;
            for (int64_t k = 0; k < steps * GROUP; k++) {
                int8_t value = output < outputs && k < inputs ? weight[output * inputs + k] : 0;
                total += value;
                packed[((panel * steps + k / GROUP) * PANEL + j) * GROUP + k % GROUP] = value;
            }
            excess[output] = total * OFFSET;
        }
}
}
