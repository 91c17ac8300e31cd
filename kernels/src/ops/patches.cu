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

/// Whole packs where lines of patches are whole packs.
template <bool BACK, class T>
INLINE void rearrange(T* image, T* tokens, u64 count, u32 channels, u32 height, u32 width, u32 channels_last, u32 patch,
                      u32 leading) {
    constexpr u32 PACK = Pack<T>::COUNT;
    if (channels_last != 0 || patch % PACK != 0 || !aligned(image, tokens)) {
        return rearrange<BACK>(image, tokens, count, channels, height, width, channels_last, patch, patch, leading);
    }
    rearrange<BACK>(reinterpret_cast<uint4*>(image), reinterpret_cast<uint4*>(tokens), count / PACK, channels, height,
                    width / PACK, 0, patch, patch / PACK, leading);
}

#define PATCHES(NAME, T)                                                                                               \
    KERNEL(BLOCK_THREADS)                                                                                              \
    patches_##NAME(T* image, T* tokens, u64 count, u64 channels, u64 height, u64 width, u32 channels_last, u64 patch,  \
                   u64 leading) {                                                                                      \
        rearrange<false>(image, tokens, count, channels, height, width, channels_last, patch, leading);                \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    patches_backward_##NAME(T* image, T* tokens, u64 count, u64 channels, u64 height, u64 width, u32 channels_last,    \
                            u64 patch, u64 leading) {                                                                  \
        rearrange<true>(image, tokens, count, channels, height, width, channels_last, patch, leading);                 \
    }
FOR_F32_AND_BF16(PATCHES)
