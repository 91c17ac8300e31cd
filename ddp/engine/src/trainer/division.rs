//! How rows, steps and the state of a model are divided, which follows from settings, data and
//! ranks.

use ddp_comm::World;
use ddp_data::{Data, RowSpec, TaskSpec};
use ddp_nn::params::Sharing;

use crate::config::Config;
use crate::reducer::plan::BucketSizes;
use crate::reducer::{self, ReducerOptions};
use crate::step::StepOptions;

/// The most rows that pass through the model at a time in evaluation.
const EVAL_ROWS_MAX: usize = 512;
/// The most elements of their inputs, and of their outputs: 512 MiB as f32.
const EVAL_ELEMENTS_MAX: usize = 1 << 27;
/// The most tokens that pass through a model at a time in evaluation. Its layers need a few hundred
/// MB for them, and its outputs are never whole.
pub const EVAL_TOKENS_MAX: usize = 1 << 14;

/// How steps are taken.
pub fn step_options(options: &Config, world: &World) -> StepOptions {
    let reducer = ReducerOptions {
        sizes: options
            .bucket_mb
            .map(|mb| BucketSizes::of_bytes((mb * 1e6) as usize)),
        // A host may be lost, and buckets must not change then.
        hosts: if world.is_elastic() { 1 } else { world.hosts() },
        dtype: options.reduce_dtype.dtype(),
        overlap: reducer::overlaps(options.overlap, world),
        zero: options.zero,
        shards: options.same_bits,
        updates_alone: world.is_elastic() && options.zero == 0,
        backup_distance: match (world.is_elastic(), world.hosts()) {
            (false, _) => 0,
            (true, 1) => 1,
            // Hosts have neighbouring ranks.
            (true, hosts) => world.size().div_ceil(hosts),
        },
    };
    StepOptions {
        reducer,
        clip_norm: options.grad_clip.unwrap_or_default(),
        seed: options.seed,
        graph: options.graph,
    }
}

/// The most rows of one of this many shards, and of a micro-batch.
pub(super) fn rows_of_shard(options: &Config, data: &Data, shards: usize) -> [usize; 2] {
    let rows = options.batch_rows().min(data.train.rows());
    let of_shard = rows.div_ceil(shards as u64) as usize;
    let micro = options.micro_batch.unwrap_or(of_shard);
    [of_shard, micro.min(of_shard)]
}

/// How rank `rank` of `world` shares the trained part. Ranks that may be lost have all of it.
pub(super) fn sharing(reducer: ReducerOptions, world: &World, rank: usize) -> Sharing {
    if world.is_elastic() {
        return reducer.shares(world.ranks_max()).into();
    }
    reducer.sharing(rank, world.size())
}

/// Rows that pass through the model at a time in evaluation: fewer if rows are large.
pub(super) fn eval_rows(rows: &RowSpec) -> usize {
    if let TaskSpec::NextToken { .. } = rows.task {
        return (EVAL_TOKENS_MAX / rows.positions().max(1)).clamp(1, EVAL_ROWS_MAX);
    }
    let outputs = rows.positions() * rows.task.outputs();
    let elements = rows.inputs.elements().max(outputs);
    (EVAL_ELEMENTS_MAX / elements.max(1)).clamp(1, EVAL_ROWS_MAX)
}

#[cfg(test)]
mod tests {
    use ddp_data::TensorSpec;
    use ddp_kernels::DType;

    use super::*;

    #[test]
    fn large_rows_are_evaluated_fewer_at_a_time() {
        let features = |count| RowSpec::features(count, TaskSpec::numbered_classes(10));
        assert_eq!(eval_rows(&features(784)), 512);
        assert_eq!(eval_rows(&features(1 << 18)), 512);
        assert_eq!(eval_rows(&features(1 << 20)), 128);
        assert_eq!(eval_rows(&features(1 << 30)), 1);
        // 1024 positions with 2^15 classes each.
        let text = RowSpec {
            inputs: TensorSpec::new(DType::I64, &[1024]),
            targets: TensorSpec::new(DType::I64, &[1024]),
            task: TaskSpec::numbered_classes(1 << 15),
            image: Vec::new(),
        };
        assert_eq!((text.positions(), eval_rows(&text)), (1024, 4));
        let task = TaskSpec::NextToken {
            packed: false,
            vocabulary: 1 << 15,
            tokenizer: None,
            are_bytes: false,
        };
        assert_eq!(eval_rows(&RowSpec { task, ..text }), 16);
        let numbers = RowSpec::features(3, TaskSpec::Regression { outputs: 1 << 20 });
        assert_eq!((numbers.positions(), eval_rows(&numbers)), (1, 128));
    }
}
