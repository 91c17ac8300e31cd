//! The settings that messages about data name.

ddp_kernels::setting_names! {
    DATA "data" LABELS "labels" VAL_DATA "val-data" VAL_LABELS "val-labels" VAL_SPLIT "val-split"
    TASK "task" DROP "drop" CATEGORICAL "categorical" MISSING "missing" NORMALIZE "normalize"
    SEED "seed" CACHE_DIR "cache-dir" DATA_ON_DEVICE "data-on-device" BATCH_SIZE "batch-size"
    DROP_LAST "drop-last" OUT "out" MODEL "model"
    TOKENIZER "tokenizer" END_TOKEN "end-token" FIELD "field" LOSSY "lossy"
}
