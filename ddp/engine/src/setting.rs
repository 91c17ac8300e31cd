//! The settings that messages of a run name.

pub use ddp_data::setting::{BATCH_SIZE, DATA, DROP_LAST, LABELS, MODEL, OUT};

ddp_kernels::setting_names! {
    STEPS "steps" EPOCHS "epochs" BATCH_TOKENS "batch-tokens" OPTIMIZER "optimizer" LR "lr"
    MIN_LR "min-lr" SCHEDULE "schedule" WARMUP_STEPS "warmup-steps" MOMENTUM "momentum"
    NESTEROV "nesterov" GRAD_CLIP "grad-clip" GROUP "group" FREEZE "freeze" DROPOUT "dropout"
    LABEL_SMOOTHING "label-smoothing" CLASS_WEIGHTS "class-weights" DEVICE "device" DTYPE "dtype" GRAPH "graph"
    DEVICES_PER_RANK "devices-per-rank" SHARE_GPUS "share-gpus" SAME_BITS "same-bits" ZERO "zero"
    MICRO_BATCH "micro-batch" MEMORY "memory" RECOMPUTE "recompute" RECOMPUTE_PARTS "recompute-parts"
    RESUME "resume" OVERRIDE "override" INIT_FROM "init-from" LORA "lora" CONFIG "config" SAMPLE "sample" SAMPLE_HELD_OUT "sample-held-out" RANKS "ranks" MIN_RANKS "min-ranks"
    PLAIN "plain" SCHEDULE_STEPS "schedule-steps" LINEAR_PATH "linear-path" LINEAR_START "linear-start" CHECKPOINT_EVERY "checkpoint-every"
    TRACE "trace" EVAL_EVERY "eval-every" BEST "best" STOP_AFTER "stop-after" POSITION "position" NORM "norm" MLP "mlp" BIAS "bias"
}
