// unfold and its gradient: see unfold.rs, whose letters are the sizes here.
#include "common.cuh"

struct Axis {
    u64 length, places, size, stride, padding, dilation;
};

/// The columns of all windows, element by element.
template <class T>
INLINE void unfold(T* out, const T* x, u64 count, u64 images, u64 channels, Axis down, Axis across) {
    for (u64 i = first_index(); i < count; i += grid_threads()) {
        const u64 place = i / across.places, row = place / down.places / images;
        const u64 plane = place / down.places % images * channels + row / across.size / down.size;
        const u64 line = place % down.places * down.stride + row / across.size % down.size * down.dilation;
        const u64 column = i % across.places * across.stride + row % across.size * across.dilation;
        // An index before the image wraps to a very large number, so one comparison rejects it.
        const u64 h = line - down.padding, w = column - across.padding;
        out[i] = h < down.length && w < across.length ? x[(plane * down.length + h) * across.length + w] : T{};
    }
}

/// Which window has its element `at` at this index, if one has. An index before all of them wraps
/// to a very large number, so one comparison rejects it.
INLINE bool window_of(const Axis& axis, u64 index, u64 at, u64& place) {
    const u64 offset = index + axis.padding - at * axis.dilation;
    place = offset / axis.stride;
    return offset % axis.stride == 0 && place < axis.places;
}

/// The gradient of all images, element by element.
template <class T>
INLINE void fold(T* dx, const T* dout, u64 count, u64 images, u64 channels, Axis down, Axis across) {
    for (u64 i = first_index(); i < count; i += grid_threads()) {
        const u64 line = i / across.length, plane = line / down.length;
        float sum = 0.0f;
        for (u64 y = 0; y < down.size; y++) {
            u64 h, w;
            if (!window_of(down, line % down.length, y, h)) continue;
            for (u64 x = 0; x < across.size; x++) {
                if (!window_of(across, i % across.length, x, w)) continue;
                const u64 row = (plane % channels * down.size + y) * across.size + x;
                const u64 image = row * images + plane / channels;
                sum += wide(dout[(image * down.places + h) * across.places + w]);
            }
        }
        dx[i] = narrow<T>(sum);
    }
}

#define UNFOLD(FORM, BODY, NAME, T)                                                                                    \
    KERNEL(BLOCK_THREADS)                                                                                              \
    FORM##_##NAME(T* out, const T* x, u64 count, u64 images, u64 channels, u64 height, u64 width, u64 down,            \
                  u64 across, u64 size_y, u64 size_x, u64 stride_y, u64 stride_x, u64 padding_y, u64 padding_x,        \
                  u64 dilation_y, u64 dilation_x) {                                                                    \
        const Axis lines = {height, down, size_y, stride_y, padding_y, dilation_y};                                    \
        const Axis columns = {width, across, size_x, stride_x, padding_x, dilation_x};                                 \
        BODY(out, x, count, images, channels, lines, columns);                                                         \
    }
#define UNFOLD_BOTH(NAME, T) UNFOLD(unfold, unfold, NAME, T) UNFOLD(unfold_backward, fold, NAME, T)
FOR_F32_AND_BF16(UNFOLD_BOTH)
