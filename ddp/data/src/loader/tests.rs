//! Which rows a loader returns, and on which device.

mod padded;

use std::sync::Arc;

use ddp_kernels::{DType, Device, Member, Seed, Tensor};

use super::*;
use crate::dataset::{Dataset, check_gather, each_row, sampled_hash};
use crate::sampler::share;
use crate::{Data, InMemory, RowSpec, TaskSpec, TensorSpec, open, read_rows};

/// Rows whose only feature and whose target are the number of the row.
fn numbered(rows: usize, held_out: usize) -> Data {
    let numbers = |count: usize| -> Arc<dyn Dataset> {
        let numbers: Vec<f32> = (0..count).map(|row| row as f32).collect();
        let numbers = Tensor::from_slice(&numbers, &[count, 1], Device::Cpu).unwrap();
        let task = TaskSpec::Regression { outputs: 1 };
        Arc::new(InMemory::new(numbers.clone(), numbers, task).unwrap())
    };
    Data::new(numbers(rows), numbers(held_out), String::new())
}

fn rows_of(x: &Tensor) -> Vec<u64> {
    let numbers = x.to_vec::<f32>().unwrap();
    numbers.into_iter().map(|number| number as u64).collect()
}

#[test]
fn the_order_of_rows_does_not_depend_on_the_number_of_ranks() {
    /// Orders of two epochs are kept: the third and fourth replace them.
    const EPOCHS: u64 = 4;
    let data = numbered(103, 0);
    let sampler = Sampler::new(103, 10, 3, false).unwrap();
    let order = |size: usize, micro: Option<usize>| {
        let mut loaders: Vec<Loader> = (0..size)
            .map(|rank| {
                Loader::new(
                    Source::new(data.train.clone(), [Device::Cpu; 2]),
                    sampler,
                    rank,
                    size,
                    micro,
                )
                .unwrap()
            })
            .collect();
        let mut rows = Vec::new();
        for step in 0..EPOCHS * sampler.steps_per_epoch() {
            let mut next = 0;
            for loader in &mut loaders {
                let batch = loader.load(step).unwrap();
                assert_eq!(
                    (batch.step, batch.epoch),
                    (step, step / sampler.steps_per_epoch())
                );
                assert_eq!(batch.first, next);
                let mut mine = Vec::new();
                for index in 0..batch.micro_count() {
                    let part = batch.micro(index).unwrap();
                    assert_eq!(part.first, next + mine.len() as u64);
                    assert_eq!(rows_of(&part.targets), rows_of(&part.x));
                    assert_eq!(part.x.shape()[0], part.rows);
                    mine.extend(rows_of(&part.x));
                }
                assert_eq!(mine, rows_of(&batch.x));
                assert_eq!(mine.len(), batch.mine);
                next += mine.len() as u64;
                let whole = batch.rows;
                assert_eq!(loader.rows(), mine);
                if next == whole {
                    assert!(loader.shards.numbers().end == size || whole < size as u64);
                }
                rows.extend(mine);
            }
            assert_eq!(next, if step % 11 == 10 { 3 } else { 10 });
        }
        rows
    };
    let alone = order(1, None);
    let epochs: Vec<&[u64]> = alone.chunks(103).collect();
    for (number, epoch) in epochs.iter().enumerate() {
        assert!(!epochs[..number].contains(epoch), "epoch {number} is new");
        let mut rows = epoch.to_vec();
        rows.sort_unstable();
        assert_eq!(rows, (0..103).collect::<Vec<_>>());
    }
    for (size, micro) in [
        (1, Some(3)),
        (2, None),
        (3, Some(2)),
        (4, Some(1)),
        (12, None),
        (12, Some(100)),
    ] {
        assert_eq!(
            order(size, micro),
            alone,
            "{size} ranks, micro-batches of {micro:?}"
        );
    }
}

#[test]
fn a_rank_without_rows_has_an_empty_batch() {
    let data = numbered(100, 0);
    let sampler = Sampler::new(100, 3, 0, false).unwrap();
    let mut loader = Loader::new(
        Source::new(data.train, [Device::Cpu; 2]),
        sampler,
        0,
        5,
        Some(8),
    )
    .unwrap();
    let batch = loader.load(0).unwrap();
    assert_eq!((batch.mine, batch.micro_count(), batch.rows), (0, 0, 3));
    assert_eq!(batch.x.shape().dims(), [0, 1]);
}

#[test]
fn two_slots_alternate_so_that_gathering_overlaps_the_step() {
    let data = numbered(100, 0);
    let sampler = Sampler::new(100, 10, 0, false).unwrap();
    let mut loader = Loader::new(
        Source::new(data.train.clone(), [Device::Cpu; 2]),
        sampler,
        0,
        1,
        None,
    )
    .unwrap();
    let first = loader.load(0).unwrap().x.clone();
    let before = rows_of(&first);
    // Sleep: the second is gathered by now, or is being.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(rows_of(&first), before);
    let second = loader.load(1).unwrap().x.clone();
    assert!(!first.shares_memory_with(&second));
    assert!(first.shares_memory_with(&loader.load(2).unwrap().x));
}

#[test]
fn a_batch_that_was_gathered_ahead_is_the_one_that_was_asked_for() {
    let data = numbered(1000, 0);
    let sampler = Sampler::new(1000, 32, 7, false).unwrap();
    let mut ahead = Loader::new(
        Source::new(data.train.clone(), [Device::Cpu; 2]),
        sampler,
        0,
        2,
        None,
    )
    .unwrap();
    for step in 0..70 {
        let expected = {
            let mut alone = Loader::new(
                Source::new(data.train.clone(), [Device::Cpu; 2]),
                sampler,
                0,
                2,
                None,
            )
            .unwrap();
            alone.ends_before(step);
            rows_of(&alone.load(step).unwrap().x)
        };
        let batch = rows_of(&ahead.load(step).unwrap().x);
        assert_eq!(
            (&batch, ahead.rows()),
            (&expected, &expected[..]),
            "step {step}"
        );
    }
}

#[test]
fn a_step_loaded_out_of_turn_is_the_same() {
    let data = numbered(1000, 0);
    let sampler = Sampler::new(1000, 32, 7, false).unwrap();
    let mut loader = Loader::new(
        Source::new(data.train, [Device::Cpu; 2]),
        sampler,
        1,
        3,
        None,
    )
    .unwrap();
    let straight: Vec<_> = (0..70)
        .map(|step| rows_of(&loader.load(step).unwrap().x))
        .collect();
    for step in [69, 0, 31, 32, 5] {
        assert_eq!(
            rows_of(&loader.load(step).unwrap().x),
            straight[step as usize],
            "step {step}"
        );
    }
}

#[test]
fn evaluation_sees_every_row_once_in_order_on_any_number_of_ranks() {
    let data = numbered(1, 107);
    for size in [1, 2, 3, 8, 200] {
        let mut seen = Vec::new();
        for rank in 0..size {
            let mut batches = InOrder::new(
                Source::new(data.held_out.clone(), [Device::Cpu; 2]),
                rank,
                size,
                10,
            )
            .unwrap();
            for index in 0..batches.count() {
                let batch = batches.load(index).unwrap();
                assert_eq!((batch.first, batch.rows), (seen.len() as u64, 107));
                assert!(batch.mine > 0 && batch.mine <= 10);
                seen.extend(rows_of(&batch.x));
            }
        }
        assert_eq!(seen, (0..107).collect::<Vec<_>>(), "{size} ranks");
    }
    let nothing = numbered(1, 0);
    assert_eq!(
        InOrder::new(Source::new(nothing.held_out, [Device::Cpu; 2]), 0, 1, 10)
            .unwrap()
            .count(),
        0
    );
}

#[test]
fn ranks_that_take_turns_have_the_same_batches_for_any_number_of_ranks() {
    for (rows, size) in [(1, 1), (1, 8), (103, 10), (100, 10), (257, 200), (64, 64)] {
        let expected: Vec<Vec<u64>> = (0..rows as u64)
            .collect::<Vec<_>>()
            .chunks(size)
            .map(<[u64]>::to_vec)
            .collect();
        for ranks in [1, 2, 3, 7, 20] {
            let source = || Source::new(numbered(rows, 0).train, [Device::Cpu; 2]);
            let mut all: Vec<InOrder> = (0..ranks)
                .map(|rank| InOrder::in_turns(source(), rank, ranks, size).unwrap())
                .collect();
            let mut batches = Vec::new();
            for round in 0..all[0].rounds() {
                for of_rank in all.iter_mut().filter(|of_rank| round < of_rank.count()) {
                    let batch = of_rank.load(round).unwrap();
                    let rows = rows_of(&batch.x);
                    assert_eq!(batch.first, rows[0]);
                    batches.push(rows);
                }
            }
            assert_eq!(batches, expected, "{ranks} ranks");
        }
    }
}

#[test]
fn a_builder_leaves_rows_in_order_unless_told_and_wants_a_device() {
    let build = |shuffled: bool, rank: usize| {
        let builder = Loader::builder(numbered(10, 0).train).batch_size(4);
        let builder = if shuffled {
            builder.shuffle(Seed(3)).drop_last()
        } else {
            builder
        };
        let member = Member {
            rank,
            size: 2,
            device: Some(Device::Cpu),
        };
        builder.build(member).unwrap()
    };
    let epoch = |shuffled: bool| {
        let mut loaders = [0, 1].map(|rank| build(shuffled, rank));
        let steps = loaders[0].sampler().steps_per_epoch();
        let mut rows = Vec::new();
        for step in 0..steps {
            for loader in &mut loaders {
                rows.extend(rows_of(&loader.load(step).unwrap().x));
            }
        }
        rows
    };
    assert_eq!(epoch(false), (0..10).collect::<Vec<_>>());
    let sampler = Sampler::new(10, 4, 3, true).unwrap();
    let order = sampler.permutation(0);
    let expected: Vec<u64> = (0..8).map(|position| order.row(position)).collect();
    assert_eq!(epoch(true), expected);
    let nowhere = Member {
        rank: 0,
        size: 1,
        device: None,
    };
    let refused = Loader::builder(numbered(10, 0).train).build(nowhere);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("call world.device()? before build"), "{text}");
}

#[test]
fn classes_come_as_whole_numbers_beside_their_images() {
    let data = open(&"glyphs,rows=50".parse().unwrap()).unwrap();
    let mut loader = Loader::new(
        Source::new(data.train.clone(), [Device::Cpu; 2]),
        Sampler::new(50, 8, 0, false).unwrap(),
        0,
        1,
        None,
    )
    .unwrap();
    let batch = loader.load(0).unwrap();
    assert_eq!(batch.x.to_string(), "\"batch\" f32[8, 784] on cpu");
    let (x, classes) = (
        batch.x.to_vec::<f32>().unwrap(),
        batch.targets.to_vec::<i64>().unwrap(),
    );
    let rows = loader.rows().to_vec();
    let [again, labels] = read_rows(&*data.train, &rows).unwrap();
    assert_eq!(x, again.to_vec::<f32>().unwrap());
    assert_eq!(classes, labels.to_vec::<i64>().unwrap());
}

/// Rows of whole numbers in two dimensions with a class for each line: every number tells its row.
#[derive(Debug)]
struct Lines(RowSpec);

const LINES: usize = 3;
const WIDTH: usize = 2;

impl Lines {
    fn new() -> Lines {
        Lines(RowSpec {
            inputs: TensorSpec::new(DType::I64, &[LINES, WIDTH]),
            targets: TensorSpec::new(DType::U8, &[LINES]),
            task: TaskSpec::numbered_classes(4),
            image: Vec::new(),
        })
    }
}

impl Dataset for Lines {
    fn rows(&self) -> u64 {
        21
    }

    fn spec(&self) -> &RowSpec {
        &self.0
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!("lines {:x}", sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        let each = |width: u64| {
            let numbers = move |&row: &u64| (0..width).map(move |at| row * width + at);
            rows.iter().flat_map(numbers)
        };
        inputs.with_slice_mut(|inputs: &mut [i64]| {
            let numbers = each((LINES * WIDTH) as u64);
            inputs
                .iter_mut()
                .zip(numbers)
                .for_each(|(to, number)| *to = number as i64);
        })?;
        Ok(targets.with_slice_mut(|targets: &mut [u8]| {
            let numbers = each(LINES as u64);
            targets
                .iter_mut()
                .zip(numbers)
                .for_each(|(to, number)| *to = (number % 4) as u8);
        })?)
    }
}

#[test]
fn inputs_may_be_integers_in_two_dimensions_with_a_target_for_each_position() {
    let data: Arc<dyn Dataset> = Arc::new(Lines::new());
    assert_ne!(data.fingerprint().unwrap(), "lines 0");
    let sampler = Sampler::new(21, 8, 3, false).unwrap();
    for rank in 0..2 {
        let mut loader = Loader::new(
            Source::new(data.clone(), [Device::Cpu; 2]),
            sampler,
            rank,
            2,
            Some(3),
        )
        .unwrap();
        let mut batches =
            InOrder::new(Source::new(data.clone(), [Device::Cpu; 2]), rank, 2, 4).unwrap();
        let check = |batch: &Batch, rows: &[u64]| {
            let [inputs, targets] = read_rows(&*data, rows).unwrap();
            assert_eq!(batch.x.shape().dims(), [rows.len(), LINES, WIDTH]);
            assert_eq!(batch.targets.shape().dims(), [rows.len(), LINES]);
            let expected = inputs.to_vec::<i64>().unwrap();
            assert_eq!(batch.x.to_vec::<i64>().unwrap(), expected);
            let expected = targets.to_vec::<u8>().unwrap();
            assert_eq!(batch.targets.to_vec::<u8>().unwrap(), expected);
        };
        for step in 0..7 {
            let batch = loader.load(step).unwrap().clone();
            check(&batch, loader.rows());
            let micro = batch.micro(0).unwrap();
            assert_eq!(micro.x.shape().dims(), [micro.rows, LINES, WIDTH]);
            assert_eq!(micro.targets.shape().dims(), [micro.rows, LINES]);
        }
        for index in 0..batches.count() {
            let batch = batches.load(index).unwrap();
            let rows: Vec<u64> = (batch.first..batch.first + batch.mine as u64).collect();
            check(batch, &rows);
        }
    }
}

#[test]
fn micro_batches_of_shards_have_each_row_once_and_in_order() {
    for (of, ranks, rows, micro) in [
        (12, 1, 100, 3),
        (12, 5, 100, 1),
        (7, 3, 5, 2),
        (8, 3, 64, 8),
        (9, 2, 1000, 40),
        (1024, 1, 1500, 1),
        (5, 5, 12, 2),
    ] {
        for rank in 0..ranks {
            let shards = Shards::of_rank(of, rank, ranks);
            let own = shards.share(&(0..rows));
            let x = || {
                Tensor::zeros(
                    &[(own.end - own.start) as usize, 1],
                    DType::F32,
                    Device::Cpu,
                )
            };
            let batch = Batch::new(0, 0, rows, own.start, x().unwrap(), x().unwrap(), micro);
            let batch = batch.in_shards(shards);
            let (mut next, mut micros) = (own.start, 0);
            for shard in shards.numbers() {
                assert_eq!(
                    batch.micros_of(shard).start,
                    micros,
                    "shard {shard} of {of}"
                );
                let end = share(&(0..rows), shard, of).end;
                while next < end {
                    let part = batch.micro(micros).unwrap();
                    assert_eq!(part.first, next, "micro-batch {micros}");
                    assert_eq!(part.rows as u64, (end - next).min(micro as u64));
                    (next, micros) = (next + part.rows as u64, micros + 1);
                }
                assert_eq!(batch.micros_of(shard).end, micros, "shard {shard} of {of}");
            }
            assert_eq!((next, batch.micro_count()), (own.end, micros));
        }
    }
}
