// A layer of the decoder at one position of each hypothesis, in one call. `steps.py` has the same structures.
//
//     post-norm  x = LN(x + F(x)),  pre-norm  x = x + F(LN(x)),  for self-attention, attention to the source and FFN
#include "attention.h"
#include "search.h"

struct Norm {
    int64_t kind;  // 0: none, 1: LayerNorm, 2: RMSNorm
    const float *weight, *bias;
    double eps;
};

struct Layer {
    int64_t pre_norm;
    Norm norms[3];
    Attention self, source;
    Linear fc1, gate, fc2;  // fc2(act(fc1(x)) * gate(x)); without gate if it has no outputs
    int64_t activation;     // an Activation
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

static Scratch& scratch_for(int64_t rows, int64_t width, int64_t wide, int64_t heads) {
    static thread_local Scratch scratch;
    scratch.normed.resize(rows * width);
    scratch.wide.resize(rows * wide);
    scratch.heads.resize(rows * heads);
    return scratch;
}

// Rotate the queries and keys of all hypotheses by the angles of this position: see rotary.py.
static void rotate(const Attention& a, const Step& step, const Keys& keys, float* qkv) {
    const int64_t rows = step.sentences * step.beam, width = (a.heads + 2 * a.kv_heads) * a.dim, half = a.dim / 2;
#pragma omp parallel for num_threads((int)step.threads) if (step.threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < a.heads + a.kv_heads; head++) {
            float *first = qkv + row * width + head * a.dim, *second = first + half;
            for (int64_t d = 0; d < half; d += LANES) {
                const int64_t left = half - d;
                const Vec x = load_up_to(first + d, left), y = load_up_to(second + d, left);
                store_up_to(first + d, x * load_up_to(keys.cos + d, left) + y * load_up_to(keys.sin + d, left), left);
                store_up_to(second + d, y * load_up_to(keys.cos + half + d, left) + x * load_up_to(keys.sin + half + d, left), left);
            }
        }
}

// y = W_o (heads + added) + residual
static void attend(bool to_source, const Attention& attention, const Step& step, const Keys& keys, const float* x,
                   const float* added, const float* residual, float* y, Scratch& scratch) {
    const int64_t rows = step.sentences * step.beam, width = attention.heads * attention.dim;
    float *wide = scratch.wide.data(), *heads = scratch.heads.data();
    multiply(attention.input, x, wide, rows, (int)step.threads, {NO_ACTIVATION, nullptr});
    if (!to_source && keys.cos) rotate(attention, step, keys, wide);
    if (to_source)
        attend_all(attend_source, keys.sources, attention, step, keys, wide, heads);
    else
        attend_all(attend_target, step.sentences, attention, step, keys, wide, heads);
    for (int64_t k = 0; added && k < rows * width; k++) heads[k] += added[k];
    multiply(attention.output, heads, y, rows, (int)step.threads, {NO_ACTIVATION, residual});
}

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
    const int64_t rows = step.sentences * step.beam, width = layer.fc2.outputs;
    const int threads = (int)step.threads;
    const int64_t wide = std::max(layer.self.input.outputs, layer.fc1.outputs + layer.gate.outputs);
    Scratch& scratch = scratch_for(rows, width, wide, layer.self.heads * layer.self.dim);
    for (int source = 0; source < (layer.source.heads ? 2 : 1); source++)
        connect(layer, layer.norms[source], step, width, scratch, source ? y : x, y,
                [&](const float* in, const float* residual, float* out) {
                    const Attention& attention = source ? layer.source : layer.self;
                    attend(source, attention, step, *cache, in, nullptr, residual, out, scratch);
                });
    connect(layer, layer.norms[2], step, width, scratch, y, y, [&](const float* in, const float* residual, float* out) {
        float *hidden = scratch.wide.data(), *gate = layer.gate.outputs ? hidden + rows * layer.fc1.outputs : nullptr;
        if (gate) multiply(layer.gate, in, gate, rows, threads, {NO_ACTIVATION, nullptr});
        multiply(layer.fc1, in, hidden, rows, threads, {(Activation)layer.activation, nullptr, gate});
        multiply(layer.fc2, hidden, out, rows, threads, {NO_ACTIVATION, residual});
    });
}

// Layers that each read the one below; y has the outputs of all.
void stack_step(const Layer* const* layers, const Keys* const* caches, int64_t count, const Step* step, const float* x,
                float* y) {
    for (int64_t k = 0; k < count; k++) {
        layer_step(layers[k], step, caches[k], x, y);
        x = y;
        y += step->sentences * step->beam * layers[k]->fc2.outputs;
    }
}

// y = W_o (heads + added), added: rows x C or null
void attention_step(const Attention* attention, int64_t to_source, const Step* step, const Keys* keys, const float* x,
                    const float* added, float* y) {
    const int64_t rows = step->sentences * step->beam;
    Scratch& scratch = scratch_for(rows, 0, attention->input.outputs, attention->heads * attention->dim);
    attend(to_source, *attention, *step, *keys, x, added, nullptr, y, scratch);
}

struct Lstm {
    Linear fc1, fc2, gates;
    Norm hidden;
    const float *gate_weight, *gate_bias;  // 3 x C
    double gate_eps;
};

// Eq. (1) to (4) and (6) to (8) of the depth-wise LSTM: Out and Cell (rows x C) of the state before and A (rows x width).
void lstm_step(const Lstm* of, const float* before, const float* attention, int64_t width, const float* old_cell,
               float* out, float* cell, int64_t rows, int64_t threads) {
    const Lstm& lstm = *of;
    const int64_t dim = lstm.fc2.outputs, inputs = dim + width, hidden = lstm.fc2.inputs;
    Scratch& scratch = scratch_for(rows, inputs, std::max(2 * hidden, 3 * dim), dim + hidden);
    float *c = scratch.normed.data(), *wide = scratch.wide.data(), *h = scratch.heads.data(), *glu = h + rows * dim;
    for (int64_t row = 0; row < rows; row++) {
        memcpy(c + row * inputs, before + row * dim, 4 * dim);
        memcpy(c + row * inputs + dim, attention + row * width, 4 * width);
    }
    multiply(lstm.fc1, c, wide, rows, (int)threads, {NO_ACTIVATION, nullptr});
    for (int64_t row = 0; row < rows; row++) {
        float* from = wide + row * 2 * hidden;
        normalise(lstm.hidden, from, from, 2 * hidden);
        for (int64_t k = 0; k < hidden; k += LANES) {
            Vec gate = sigmoid(load_up_to(from + hidden + k, hidden - k));
            store_up_to(glu + row * hidden + k, load_up_to(from + k, hidden - k) * gate, hidden - k);
        }
    }
    multiply(lstm.fc2, glu, h, rows, (int)threads, {NO_ACTIVATION, nullptr});
    multiply(lstm.gates, c, wide, rows, (int)threads, {NO_ACTIVATION, nullptr});
    for (int64_t row = 0; row < rows; row++) {
        float* z = wide + row * 3 * dim;
        for (int gate = 0; gate < 3; gate++) {
            Norm norm = {1, lstm.gate_weight + gate * dim, lstm.gate_bias + gate * dim, lstm.gate_eps};
            normalise(norm, z + gate * dim, z + gate * dim, dim);
        }
        for (int64_t k = 0; k < dim; k += LANES) {
            const int64_t left = dim - k, place = row * dim + k;
            Vec i = sigmoid(load_up_to(z + k, left)), f = sigmoid(load_up_to(z + dim + k, left));
            Vec next = load_up_to(old_cell + place, left) * f + load_up_to(h + place, left) * i;
            store_up_to(cell + place, next, left);
            store_up_to(out + place, next * sigmoid(load_up_to(z + 2 * dim + k, left)), left);
        }
    }
}

// y = sum_k weights_k entries_k over tensors of `size` numbers.
void weighted_sum(const float* const* entries, const float* weights, int64_t count, int64_t size, float* y) {
    for (int64_t place = 0; place < size; place += LANES) {
        Vec total = {};
        for (int64_t k = 0; k < count; k++) total += weights[k] * load_up_to(entries[k] + place, size - place);
        store_up_to(y + place, total, size - place);
    }
}

void linear_product(const Linear* linear, const float* x, float* y, int64_t rows, int64_t threads) {
    multiply(*linear, x, y, rows, (int)threads, {NO_ACTIVATION, nullptr});
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
