//! Operations, those of one kind in a file; the CUDA kernels of each are in a `.cu` file.
//!
//! Operations write into tensors that the caller passes, and backward is a separate call; nn's
//! modules derive theirs, from chains (`chain.rs`). Where `foo_into` has a short form `foo`, that
//! makes the output on the operands' device. Shapes are not broadcast, except in chains and
//! linear's bias.
//!
//! `call.rs` has what all operations do before their math, `elementwise.rs` the elementwise loops,
//! `update.rs` the steps of optimizers.

mod activation;
mod adamw;
mod addmm;
mod arithmetic;
mod attention;
mod call;
mod cast;
mod chain;
mod chunks;
mod copy;
pub(crate) mod create;
mod cross_entropy;
mod digest;
mod dropout;
mod elementwise;
mod embedding;
mod float;
mod formulas;
mod gather;
mod linear;
mod matmul;
mod mse;
mod muon;
mod norm;
mod rope;
mod round;
mod sgd;
mod sources;
mod step;
mod stored;
mod sum;
#[path = "ops/tests/testing.rs"]
#[cfg(test)]
pub(crate) mod testing;
mod unfold;
mod update;

pub use crate::launch::{F32Math, f32_math, with_f32_math};
pub use activation::{
    AboutActivation, Activation, activate, activate_backward_into, activate_into,
    swiglu_backward_into, swiglu_into,
};
pub use adamw::{AdamwConstants, AdamwScalars, adamw};
pub use addmm::{addmm, addmm_into};
pub use arithmetic::{axpy, scale_into};
pub use attention::{Attention, attention_backward_into, attention_cached_into, attention_into};
pub use cast::{cast, cast_into};
pub use chain::{Chain, ChainStep, ChainView, Function, chain_into};
pub use chunks::{Chunk, ChunkTable, QUANTUM};
pub use copy::Destination;
pub use create::{fill_into, zero};
pub use cross_entropy::{CrossEntropyOptions, CrossEntropyOut, cross_entropy};
pub use digest::{DIGEST, digest_mix, digest_quanta};
pub use dropout::{DropoutKey, dropout, dropout_into};
pub use embedding::{
    EmbeddingScratch, embedding_backward_into, embedding_into, embedding_positions_backward_into,
    embedding_sums_of, split_documents_into,
};
pub use gather::gather_rows;
pub use linear::{
    add_row_sums_into, linear_backward_input_into, linear_backward_input_summed_into,
    linear_backward_weight_into, linear_into, prefers_row_sums, row_block_sums_into, row_sums_of,
};
pub use matmul::bf16::{Bf16Order, bf16_order, set_bf16_order, with_bf16_order};
pub use mse::mse_into;
pub use muon::{divide_by_norm, muon_direction};
pub use norm::{
    Norm, NormGradients, NormOptions, add_norm_into, norm_backward_into, norm_blocks_of, norm_into,
    norm_sums_rows,
};
pub use rope::{rope_backward_into, rope_frequencies, rope_into, rope_table};
pub use sgd::{SgdConstants, SgdScalars, sgd};
pub(crate) use sources::SOURCES;
pub use step::{
    STEP_FLAGS, StepMarks, clip_scale, decide_step, grad_norm_partials, mark_nonfinite,
    vote_stopped,
};
pub use sum::{
    AddOrder, add_in_order, column_sum_into, mean, mean_into, row_sum_into, sum, sum_into,
};
pub use unfold::{Windows, unfold_backward_into, unfold_into};
pub use update::UpdateTensors;
