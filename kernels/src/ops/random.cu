// Random tensors with the bits of random.rs.
#include "common.cuh"

/// Turns a block of 128 random bits into COUNT elements: uniforms in [0, 1) with 2^DIGITS values.
/// Lower bits are cut off, because rounding could reach 1.
template <class T, int DIGITS> struct Uniform {
    static constexpr int COUNT = 4;
    INLINE T one(u32 bits) const {
        constexpr float STEPS = (float)(1 << DIGITS);
        return narrow<T>(truncf(uniform(bits) * STEPS) / STEPS);
    }
    INLINE void make(uint4 bits, T* out) const {
        out[0] = one(bits.x);
        out[1] = one(bits.y);
        out[2] = one(bits.z);
        out[3] = one(bits.w);
    }
};

template <> struct Uniform<double, 53> {
    static constexpr int COUNT = 2;
    INLINE void make(uint4 bits, double* out) const {
        out[0] = uniform_f64(bits.x, bits.y);
        out[1] = uniform_f64(bits.z, bits.w);
    }
};

/// Normals of f32, rounded.
INLINE void put(double* out, float normal) { *out = normal; }
template <class T> INLINE void put(T* out, float normal) { *out = narrow<T>(normal); }

template <class T> struct Normal {
    static constexpr int COUNT = 4;
    INLINE void make(uint4 bits, T* out) const {
        const float2 first = normal_pair(bits.x, bits.y), second = normal_pair(bits.z, bits.w);
        put(out, first.x);
        put(out + 1, first.y);
        put(out + 2, second.x);
        put(out + 3, second.y);
    }
};

/// Integers in 0..bound, which T can hold.
template <class T> struct Below {
    static constexpr int COUNT = 4;
    u32 bound;
    INLINE void make(uint4 bits, T* out) const {
        out[0] = (T)below(bits.x, bound);
        out[1] = (T)below(bits.y, bound);
        out[2] = (T)below(bits.z, bound);
        out[3] = (T)below(bits.w, bound);
    }
};

/// Element i comes from its own words of the draw, in any thread. A thread makes the elements of a
/// block, or of a pack if those are more.
template <class T, class M> INLINE void draw_all(T* out, u64 count, u32 key_0, u32 key_1, u64 draw, M maker) {
    typedef Pack<T> P;
    constexpr int EACH = P::COUNT > M::COUNT ? P::COUNT : M::COUNT;
    constexpr int BLOCKS = EACH / M::COUNT;
    const bool packed = aligned(out);
    for (u64 group = first_index(); group * EACH < count; group += grid_threads()) {
        T values[EACH];
        UNROLLED for (int b = 0; b < BLOCKS; b++) {
            const u64 block = group * BLOCKS + b;
            const uint4 counter = make_uint4((u32)block, (u32)(block >> 32), (u32)draw, (u32)(draw >> 32));
            maker.make(philox4x32(counter, key_0, key_1), values + b * M::COUNT);
        }
        const u64 first = group * EACH, left = count - first;
        if (packed && left >= EACH) {
            UNROLLED for (int p = 0; p < EACH / P::COUNT; p++) {
                P pack;
                UNROLLED for (int i = 0; i < P::COUNT; i++) pack.values[i] = values[p * P::COUNT + i];
                store_pack(out, group * (EACH / P::COUNT) + p, pack);
            }
        } else {
            UNROLLED for (int i = 0; i < EACH; i++) {
                if (i < left) out[first + i] = values[i];
            }
        }
    }
}

#define UNIFORM(NAME, T, DIGITS)                                                                                       \
    KERNEL(BLOCK_THREADS) rand_##NAME(T* out, u64 count, u32 key_0, u32 key_1, u64 draw, u32) {                        \
        draw_all(out, count, key_0, key_1, draw, Uniform<T, DIGITS>());                                                \
    }
UNIFORM(f32, float, 24)
UNIFORM(bf16, bf16, 8)
UNIFORM(f64, double, 53)

#define NORMAL(NAME, T)                                                                                                \
    KERNEL(BLOCK_THREADS) randn_##NAME(T* out, u64 count, u32 key_0, u32 key_1, u64 draw, u32) {                       \
        draw_all(out, count, key_0, key_1, draw, Normal<T>());                                                         \
    }
FOR_F32_AND_BF16(NORMAL)
NORMAL(f64, double)

#define BELOW(NAME, T)                                                                                                 \
    KERNEL(BLOCK_THREADS) randint_##NAME(T* out, u64 count, u32 key_0, u32 key_1, u64 draw, u32 bound) {                 \
        draw_all(out, count, key_0, key_1, draw, Below<T>{bound});                                                     \
    }
BELOW(u8, u8)
BELOW(i32, i32)
BELOW(i64, i64)
