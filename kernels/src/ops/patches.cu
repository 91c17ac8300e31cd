// patches and their gradient: see patches.rs.
#include "common.cuh"

/// The pixels of each image and the tokens of its patches, element by element of the tokens: from
/// pixels to tokens, or back. A patch has `down` lines of `patch` elements.
template <bool BACK, class T>
INLINE void rearrange(T* image, T* tokens, u64 count, u32 channels, u32 height, u32 width, u32 channels_last, u32 down,
                      u32 patch, u32 leading) {
    const u32 across = width / patch, area = down * patch, columns = channels * area;
    const u64 places = (u64)(leading + height / down * across) * columns, pixels = (u64)channels * height * width;
    for (u64 i = first_index(); i < count; i += grid_threads()) {
        const u64 place = i % places;
        const u32 at = (u32)(place % columns);
        if (place / columns < leading) {
            if (!BACK) tokens[i] = T{};
            continue;
        }
        const u32 token = (u32)(place / columns) - leading;
        const u64 line = token / across * down + at % area / patch, column = token % across * patch + at % patch;
        const u64 pixel = channels_last != 0 ? (line * width + column) * channels + at / area
                                             : ((u64)(at / area) * height + line) * width + column;
        T& element = image[i / places * pixels + pixel];
        if (BACK) {
            element = tokens[i];
        } else {
            tokens[i] = element;
        }
    }
}

/// The widest packs, up to N elements, of which lines of patches are whole ones. Where the channels
/// of a pixel lie together, neighbours in a token do not in the image.
template <bool BACK, int N, class T>
INLINE void rearrange(T* image, T* tokens, u64 count, u32 channels, u32 height, u32 width, u32 channels_last, u32 patch,
                      u32 leading) {
    typedef typename Pack<T, N>::Whole Whole;
    if constexpr (N > 1) {
        if (channels_last != 0 || patch % N != 0 || !aligned<sizeof(Whole)>(image, tokens)) {
            return rearrange<BACK, N / 2>(image, tokens, count, channels, height, width, channels_last, patch, leading);
        }
    }
    rearrange<BACK>(reinterpret_cast<Whole*>(image), reinterpret_cast<Whole*>(tokens), count / N, channels, height,
                    width / N, channels_last, patch, patch / N, leading);
}

#define PATCHES(NAME, T)                                                                                               \
    KERNEL(BLOCK_THREADS)                                                                                              \
    patches_##NAME(T* image, T* tokens, u64 count, u64 channels, u64 height, u64 width, u32 channels_last, u64 patch,  \
                   u64 leading) {                                                                                      \
        rearrange<false, Pack<T>::COUNT>(image, tokens, count, channels, height, width, channels_last, patch, leading);\
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    patches_backward_##NAME(T* image, T* tokens, u64 count, u64 channels, u64 height, u64 width, u32 channels_last,    \
                            u64 patch, u64 leading) {                                                                  \
        rearrange<true, Pack<T>::COUNT>(image, tokens, count, channels, height, width, channels_last, patch, leading); \
    }
FOR_F32_AND_BF16(PATCHES)
