//! The settings that messages about models name.

ddp_kernels::setting_names! {
    WIDTH "width" HEADS "heads" IMAGE "image" DEVICES_PER_RANK "devices-per-rank"
}
