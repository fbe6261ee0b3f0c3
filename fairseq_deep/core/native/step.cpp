// The functions of the kernels, each one call from Python.
#include "search.h"
#include "stacks.h"

extern "C" {

// y = W_o (heads + added), added: rows x C or null
void attention_step(const Attention* attention, int64_t to_source, const Step* step, const Keys* keys, const float* x,
                    const float* added, float* y) {
    const int64_t rows = step->sentences * step->beam;
    Scratch& scratch = scratch_for(rows, 0, attention->input.outputs, attention->heads * attention->dim);
    attend(to_source, *attention, *step, *keys, x, added, {NO_ACTIVATION, nullptr}, y, scratch);
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
