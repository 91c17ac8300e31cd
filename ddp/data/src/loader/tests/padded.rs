//! Rows of different lengths, padded to the longest of their batch.

use super::*;

/// Rows of up to 300 elements that are padded to 300 with −1. A row's elements are its number.
#[derive(Debug)]
struct Padded(RowSpec);

impl Padded {
    fn new() -> Padded {
        let tokens = || TensorSpec::new(DType::I64, &[300]);
        let task = TaskSpec::NextToken {
            vocabulary: 1000,
            are_bytes: false,
            tokenizer: None,
            packed: false,
        };
        Padded(RowSpec {
            inputs: tokens(),
            targets: tokens(),
            task,
            image: Vec::new(),
        })
    }
}

impl Dataset for Padded {
    fn rows(&self) -> u64 {
        703
    }

    fn spec(&self) -> &RowSpec {
        &self.0
    }

    fn fingerprint(&self) -> Result<String> {
        Ok("padded".into())
    }

    fn used(&self, row: u64) -> usize {
        1 + (row * row % 300) as usize
    }

    fn shortens(&self) -> bool {
        true
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        each_row(rows, inputs, targets, |row, inputs, targets| {
            inputs.fill(-1);
            inputs[..self.used(row)].fill(row as i64);
            targets.copy_from_slice(inputs);
            Ok(())
        })
    }
}

#[test]
fn batches_of_padded_rows_are_as_long_as_their_longest_alike_on_any_number_of_ranks() {
    let data = Arc::new(Padded::new());
    let sampler = Sampler::new(703, 8, 3, false).unwrap();
    let steps = sampler.steps_per_epoch();
    // The rows and the length of each batch of two epochs, from this step on.
    let batches = |ranks: usize, from: u64| -> Vec<(Vec<u64>, usize)> {
        let source = || Source::new(data.clone(), [Device::Cpu; 2]);
        let loader = |rank| Loader::new(source(), sampler, rank, ranks, Some(3)).unwrap();
        let mut loaders: Vec<Loader> = (0..ranks).map(loader).collect();
        let of_step = |step: u64| {
            let (mut rows, mut lengths) = (Vec::new(), Vec::new());
            for loader in &mut loaders {
                let batch = loader.load(step).unwrap();
                let length = batch.x.shape()[1];
                assert_eq!(batch.whole(), Some(300));
                assert_eq!(batch.x.shape(), batch.targets.shape());
                let elements = batch.x.to_vec::<i64>().unwrap();
                assert_eq!(elements, batch.targets.to_vec::<i64>().unwrap());
                for elements in elements.chunks(length) {
                    let (row, used) = (elements[0] as u64, data.used(elements[0] as u64));
                    assert!(elements[..used].iter().all(|it| *it == row as i64));
                    assert!(elements[used..].iter().all(|it| *it == -1));
                    rows.push(row);
                }
                lengths.push(length);
                assert!(loader.rows_of(step).count() as u64 == loader.slots.last().rows);
            }
            lengths.dedup();
            assert_eq!(lengths.len(), 1, "step {step}: {lengths:?}");
            assert!(loaders[0].rows_of(step).eq(rows.iter().copied()));
            (rows, lengths[0])
        };
        (from..2 * steps).map(of_step).collect()
    };
    let alone = batches(1, 0);
    for ranks in [2, 3, 8] {
        assert!(batches(ranks, 0) == alone, "{ranks} ranks");
    }
    assert!(batches(1, 77) == alone[77..], "after a resume");
    let mut computed = 0;
    for epoch in alone.chunks(steps as usize) {
        let mut rows: Vec<u64> = epoch.iter().flat_map(|it| it.0.clone()).collect();
        computed += epoch
            .iter()
            .map(|(rows, length)| rows.len() * length)
            .sum::<usize>();
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..703));
    }
    let used: usize = (0..703).map(|row| data.used(row)).sum();
    assert!(computed < 2 * used * 5 / 4, "{computed} for 2 times {used}");
    assert!(
        alone[..steps as usize] != alone[steps as usize..],
        "another order"
    );
    let mut lengths: Vec<usize> = alone.iter().map(|it| it.1).collect();
    let is_sorted = lengths.is_sorted();
    lengths.sort_unstable();
    lengths.dedup();
    assert_eq!(lengths, [48, 64, 96, 128, 192, 256, 300]);
    assert!(!is_sorted);
}

#[test]
fn held_out_padded_rows_come_in_order_in_batches_as_long_as_their_longest() {
    let data = Arc::new(Padded::new());
    let source = Source::new(data.clone(), [Device::Cpu; 2]);
    let mut batches = InOrder::new(source, 1, 2, 16).unwrap();
    for index in 0..batches.count() {
        let batch = batches.load(index).unwrap();
        let rows = batch.first..batch.first + batch.mine as u64;
        let longest = rows.map(|row| data.used(row)).max().unwrap();
        let length = batch.x.shape()[1];
        assert!(
            longest <= length && length <= (2 * longest).max(48),
            "{length} for {longest}"
        );
    }
}
