// Activations: their values, and their derivatives times dy. activation.rs has the list, and its
// tests write this file.
#define let const float
template <class T> struct Relu {
    static INLINE float value(float z) { return select(z < number(0.0), number(0.0), z); }
    static INLINE float chain(float dy, float y) { return select(y <= number(0.0), number(0.0), dy); }
};
template <class T> struct LeakyRelu {
    static INLINE float value(float z) { return select(z > number(0.0), z, z * number(0.01)); }
    static INLINE float chain(float dy, float y) { return select(y > number(0.0), dy, dy * number(0.01)); }
};
template <class T> struct ReluSquared {
    static INLINE float value(float z) { return select(z < number(0.0), number(0.0), z * z); }
    static INLINE float chain(float dy, float z) { return select(z <= number(0.0), number(0.0), dy * (z + z)); }
};
template <class T> struct Gelu {
    static INLINE float value(float z) { return gelu_erf(z); }
    static INLINE float chain(float dy, float z) { return dy * gelu_erf_grad(z); }
};
template <class T> struct GeluTanh {
    static INLINE float value(float z) { return gelu_tanh(z); }
    static INLINE float chain(float dy, float z) { return dy * gelu_tanh_grad(z); }
};
template <class T> struct Silu {
    static INLINE float value(float z) { return silu(z); }
    static INLINE float chain(float dy, float z) { return dy * silu_slope(z); }
};
#undef let

/// The statement with F as the activation of this number, exact enough for elements of type T.
#define WITH_ACTIVATION(NUMBER, T, F, ...) \
    switch (NUMBER) { \
    case 0: { typedef Identity F; __VA_ARGS__ } break; \
    case 1: { typedef Relu<T> F; __VA_ARGS__ } break; \
    case 2: { typedef LeakyRelu<T> F; __VA_ARGS__ } break; \
    case 3: { typedef ReluSquared<T> F; __VA_ARGS__ } break; \
    case 4: { typedef Gelu<T> F; __VA_ARGS__ } break; \
    case 5: { typedef GeluTanh<T> F; __VA_ARGS__ } break; \
    case 6: { typedef Silu<T> F; __VA_ARGS__ } break; \
    }
