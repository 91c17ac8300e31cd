//! A model split over several GPUs of one process: the same bits as on one GPU, and nothing crosses
//! but what must.

#[path = "../claims/split.rs"]
mod claims;

use std::collections::BTreeMap;

use ddp::config::GraphChoice;
use ddp::data::Batch;
use ddp_kernels::device::discover;
use ddp_kernels::transfer::{Ledger, Phase, TransferKind, with_ledger};
use ddp_kernels::{Device, memory};

use self::claims::{Place, Recipe};
use crate::support::test_name;
use crate::support::training::on_ranks;
use crate::{gpu, turn};

/// How many GPUs there are, up to four.
fn gpus() -> usize {
    discover().gpus.len().min(4)
}

/// As many as there are, one after the other; on one GPU two parts of it.
fn devices(parts: usize) -> Vec<Device> {
    (0..parts).map(|part| Device::Cuda(part % gpus())).collect()
}

/// The devices of the parts, rank by rank: some of all, with one of a single rank among them.
fn places() -> Vec<Place> {
    let alone = |parts: usize| Place {
        ranks: 1,
        devices: vec![devices(parts)],
    };
    let mut places: Vec<Place> = (2..=gpus().max(2)).map(alone).collect();
    if gpus() == 4 {
        let pair = |first: usize| vec![Device::Cuda(first), Device::Cuda(first + 1)];
        places.push(Place {
            ranks: 2,
            devices: vec![pair(0), pair(2)],
        });
    }
    ddp_testing::cases_of(&test_name(), places, 2)
}

/// What is in every step of these tests: clipping, dropout, two micro-batches of 6 rows.
fn recipe() -> Recipe {
    Recipe {
        clip_norm: 0.25,
        dropout: 0.25,
        micro: Some(6),
        ..Recipe::regression()
    }
}

/// What a step moves between two devices, by (source, target, purpose): count and bytes.
type Crossed = BTreeMap<(Device, Device, &'static str), (u64, u64)>;

/// Bytes of the tied weight.
const TIED_BYTES: u64 = 40 * 40 * 4;

/// What a tied weight adds for these borrowers: its values once, and for each micro-batch its
/// gradient to the owner. The sum so far comes from there, but for the first use in the first
/// micro-batch.
fn add_tied(crossed: &mut Crossed, owner: Device, borrowers: &[Device], micro_batches: u64) {
    for (index, &borrower) in borrowers.iter().enumerate() {
        let is_last = index + 1 == borrowers.len();
        let so_far = micro_batches - u64::from(is_last);
        for (from, to, what, count) in [
            (owner, borrower, "tied values to a later device", 1),
            (
                owner,
                borrower,
                "tied gradients so far to a later device",
                so_far,
            ),
            (
                borrower,
                owner,
                "tied gradients to the owner's device",
                micro_batches,
            ),
        ] {
            if from != to {
                crossed.insert((from, to, what), (count, count * TIED_BYTES));
            }
        }
    }
}

/// Expected from the shapes: `widths` are those of rows that cross between neighbours, `quanta`
/// those of each part's parameters. Gradients go back from the parts after `lowest`, the first
/// trained one.
fn expected(
    devices: &[Device],
    widths: &[u64],
    quanta: &[u64],
    lowest: usize,
    batch: &Batch,
) -> Crossed {
    let (rows, micro_batches) = (batch.mine as u64, batch.micro_count() as u64);
    let last = devices[devices.len() - 1];
    let mut crossed = Crossed::new();
    let mut add = |from: Device, to: Device, what, count: u64, bytes: u64| {
        if from != to && bytes > 0 {
            let entry = crossed.entry((from, to, what)).or_insert((0, 0));
            (entry.0, entry.1) = (entry.0 + count, entry.1 + bytes);
        }
    };
    for (index, pair) in devices.windows(2).enumerate() {
        add(
            pair[0],
            pair[1],
            "activations to the next device",
            micro_batches,
            rows * widths[index] * 4,
        );
        if index >= lowest {
            add(
                pair[1],
                pair[0],
                "gradients to the device before",
                micro_batches,
                rows * widths[index] * 4,
            );
        }
        add(
            devices[index],
            last,
            "squares of gradients to the last device",
            1,
            quanta[index] * 8,
        );
        // Scale and norm, and the flags of the step.
        add(
            last,
            devices[index],
            "scale and first bad step to every device",
            2,
            8 + 24,
        );
    }
    crossed
}

#[test]
fn a_step_moves_what_the_shapes_say_and_nothing_else() {
    let Some(_turn) = turn() else { return };
    let parts = gpus().max(2);
    let devices = devices(parts);
    // Layers of 6x40, 40x40, 40x24, 24x4 and their biases, in quanta of 1,024 elements, cut as
    // evenly as possible.
    let (widths, quanta): (&[u64], &[u64]) = match parts {
        2 => (&[40], &[2 + 3, 2 + 2]),
        3 => (&[40, 40], &[2, 3, 4]),
        _ => (&[40, 40, 24], &[2, 3, 2, 2]),
    };
    // The first part frozen: no gradient goes to it. With it, and with two parts, the second layer.
    let first = if parts == 2 { "0.,2." } else { "0." };
    // Tied, layers of 6x40, three times 40x40, of which the first has the weight, and 40x4.
    let (tied_quanta, owner): (&[u64], usize) = match parts {
        2 => (&[2 + 3, 1 + 1 + 2], 0),
        3 => (&[2 + 3, 1, 1 + 2], 0),
        _ => (&[2, 3, 1, 1 + 2], 1),
    };
    let tied = recipe().tied();
    for (recipe, frozen, lowest) in [
        (recipe(), "nothing", 0),
        (recipe(), first, 1),
        (tied.clone(), "nothing", 0),
        (tied, "2.weight", 0),
    ] {
        let recipe = Recipe { frozen, ..recipe };
        let (widths, quanta) = if recipe.tied {
            (&[40; 3][..], tied_quanta)
        } else {
            (widths, quanta)
        };
        let mut quanta = quanta.to_vec();
        quanta[..lowest].fill(0);
        if recipe.tied && frozen != "nothing" {
            quanta[owner] -= 2;
        }
        on_ranks(1, None, |world| {
            let mut step = recipe.step(&devices, world)?;
            assert_eq!(step.graphs(), None);
            let mut loader = recipe.loader(&devices, world)?;
            // Brings the tables of chunks.
            step.measure_norm(true);
            step.run(loader.load(0)?, 0.01)?;
            step.measure_norm(false);
            let batch = loader.load(1)?;
            let ledger = Ledger::new();
            with_ledger(&ledger, || step.run(batch, 0.01))?;
            let mut seen = Crossed::new();
            for row in ledger.rows() {
                assert_eq!((row.phase, row.implicit), (Phase::Step, false), "{row:?}");
                if row.kind == TransferKind::Upload {
                    assert_eq!(row.announced, Some("numbers of the step"), "{row:?}");
                    continue;
                }
                assert_eq!(row.kind, crossing(), "{row:?}");
                let entry = seen
                    .entry((row.source, row.target, row.announced.expect("announced")))
                    .or_insert((0, 0));
                (entry.0, entry.1) = (entry.0 + row.count, entry.1 + row.bytes);
            }
            let mut expected = expected(&devices, widths, &quanta, lowest, batch);
            if recipe.tied {
                let (owner, borrowers) = (devices[owner], &devices[owner + 1..]);
                add_tied(&mut expected, owner, borrowers, batch.micro_count() as u64);
                if frozen != "nothing" {
                    expected.retain(|(_, _, what), _| !what.starts_with("tied gradients"));
                }
            }
            assert_eq!(seen, expected, "tied: {}, frozen: {frozen}", recipe.tied);
            Ok(())
        });
    }
}

/// How memory crosses between these devices.
fn crossing() -> TransferKind {
    if std::env::var("SIMCUDA_NO_PEER").is_ok_and(|value| value == "1") {
        TransferKind::Staged
    } else {
        TransferKind::Peer
    }
}

#[test]
fn a_steady_step_over_several_devices_makes_no_tensor() {
    let Some(_turn) = turn() else { return };
    let devices = devices(gpus().max(2));
    let mut sides = devices.clone();
    sides.push(Device::Cpu);
    for recipe in [recipe(), recipe().tied()] {
        makes_no_tensor(&recipe, &devices, &sides);
    }
}

fn makes_no_tensor(recipe: &Recipe, devices: &[Device], sides: &[Device]) {
    on_ranks(1, None, |world| {
        let mut step = recipe.step(devices, world)?;
        let mut loader = recipe.loader(devices, world)?;
        let mut take = |steps: std::ops::Range<u64>| {
            steps.into_iter().try_for_each(|step0| {
                step.measure_norm(step0 % 5 == 0);
                step.run(loader.load(step0)?, 0.01)
            })
        };
        take(0..8)?;
        // Tests beside this one count too; the least of several windows is this one's.
        let counts = || {
            sides
                .iter()
                .map(|&side| memory::stats(side).allocation_count)
                .collect::<Vec<_>>()
        };
        let window = |first: u64, take: &mut dyn FnMut(std::ops::Range<u64>) -> ddp::Result<()>| {
            let before = counts();
            take(first..first + 8)?;
            Ok::<u64, ddp::Error>(
                counts()
                    .iter()
                    .zip(before)
                    .map(|(after, before)| after - before)
                    .sum(),
            )
        };
        let made = (1..9)
            .map(|index| window(8 * index, &mut take))
            .collect::<ddp::Result<Vec<u64>>>()?;
        assert_eq!(made.iter().min(), Some(&0), "{made:?}");
        Ok(())
    });
}

#[test]
fn graphs_of_several_devices_are_refused() {
    let Some(gpu) = gpu() else { return };
    let error = on_ranks(1, None, |world| {
        Ok(recipe()
            .step_with(&[gpu.device; 2], world, GraphChoice::On)
            .unwrap_err())
    });
    assert_eq!(error[0].exit_code(), 2);
    assert!(
        error[0]
            .to_string()
            .contains("`graph` on: expected a step on one device, got 2 devices"),
        "{}",
        error[0]
    );
}
