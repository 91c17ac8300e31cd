//! Transfers between devices through the public interface: policies, scopes, the ledger and its
//! hints; on real or simulated GPUs.

#[path = "transfers/operands.rs"]
mod operands;

use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{self, Ledger, Phase, Policy, TransferKind};
use ddp_kernels::{DType, Device, Error, Random, Tensor, ops};

const GPU: Device = Device::Cuda(0);
const OTHER: Device = Device::Cuda(1);

/// A ledger for this test alone, where there are two devices: tests of one process run side by
/// side.
fn on_two_devices(body: impl FnOnce(&Ledger)) {
    if ddp_tests::gpus(2) {
        let ledger = Ledger::new();
        transfer::with_ledger(&ledger, || body(&ledger));
    }
}

fn randn(shape: &[usize], device: Device) -> Tensor {
    Tensor::randn(shape, DType::F32, device, &mut Random::new(4)).unwrap()
}

#[test]
fn the_mismatch_error_reads_as_promised() {
    on_two_devices(|ledger| {
        let acc = Tensor::zeros(&[1000, 1000], DType::F32, Device::Cpu).unwrap();
        let mat1 = randn(&[1000, 1000], Device::Cpu);
        let mat2 = randn(&[1000, 1000], GPU).named("w");
        let error = ops::addmm(&acc, &mat1, &mat2, 1.0, 1.0).unwrap_err();
        let line = line!() - 1;
        assert_eq!(
            error.to_string(),
            format!(
                "addmm: operands are on different devices: acc f32[1000, 1000] on cpu, mat1 f32[1000, 1000] on cpu, mat2 \
                 \"w\" f32[1000, 1000] on cuda:0 (tests/transfers.rs:{line}); help: move mat2 with .to(Device::Cpu), or acc \
                 and mat1 with .to(Device::Cuda(0))"
            )
        );
        assert!(matches!(error, Error::DeviceMismatch(_)));
        assert!(ledger.rows().is_empty());
    });
}

#[test]
fn under_allow_operands_meet_on_the_accumulators_accelerator_or_the_first_ones() {
    on_two_devices(|ledger| {
        transfer::with_policy(Policy::Allow, || {
            let (cpu, gpu, other) = (
                randn(&[4, 4], Device::Cpu),
                randn(&[4, 4], GPU),
                randn(&[4, 4], OTHER),
            );
            // The accumulator is on an accelerator: its device, even if an earlier operand has
            // another one.
            assert_eq!(
                ops::addmm(&other, &gpu, &cpu, 1.0, 1.0).unwrap().device(),
                OTHER
            );
            // The accumulator is on the CPU: the device of the first operand that is on an
            // accelerator.
            let result = ops::addmm(&cpu, &other, &gpu, 1.0, 1.0).unwrap();
            assert_eq!(result.device(), OTHER);
            let alone = [&cpu, &other, &gpu].map(|x| x.to(Device::Cpu).unwrap());
            let expected = ops::addmm(&alone[0], &alone[1], &alone[2], 1.0, 1.0).unwrap();
            assert_eq!(
                result.to_vec::<f32>().unwrap(),
                expected.to_vec::<f32>().unwrap()
            );
        });
        let implicit: u64 = ledger
            .rows()
            .iter()
            .filter(|row| row.implicit)
            .map(|row| row.count)
            .sum();
        assert_eq!(implicit, 4);
    });
}

#[test]
fn an_output_on_the_cpu_comes_back_and_both_ways_are_counted() {
    on_two_devices(|ledger| {
        let (out, a) = (randn(&[8], Device::Cpu), randn(&[8], GPU));
        transfer::with_policy(Policy::Warn, || ops::scale_into(&out, &a, 2.0)).unwrap();
        assert_eq!(out.device(), Device::Cpu);
        let expected: Vec<f32> = a.to_vec::<f32>().unwrap().iter().map(|x| x + x).collect();
        assert_eq!(out.to_vec::<f32>().unwrap(), expected);
        let implicit: Vec<(TransferKind, u64)> = ledger
            .rows()
            .iter()
            .filter(|row| row.implicit)
            .map(|row| (row.kind, row.count))
            .collect();
        assert_eq!(
            implicit,
            [(TransferKind::Upload, 1), (TransferKind::Download, 1)]
        );
    });
}

#[test]
fn scopes_nest_and_end_also_by_panic() {
    on_two_devices(|_| {
        assert_eq!(transfer::policy(), Policy::Forbid);
        transfer::with_policy(Policy::Allow, || {
            transfer::with_policy(Policy::Warn, || {
                assert_eq!(transfer::policy(), Policy::Warn)
            });
            let outcome = std::panic::catch_unwind(|| {
                transfer::with_policy(Policy::Forbid, || panic!("inside"))
            });
            assert!(outcome.is_err());
            assert_eq!(transfer::policy(), Policy::Allow);
        });
        assert_eq!(transfer::policy(), Policy::Forbid);
    });
}

#[test]
fn in_a_forbidding_scope_only_announced_transfers_pass() {
    on_two_devices(|ledger| {
        let (batch, slot) = (randn(&[16], Device::Cpu).named("batch"), randn(&[16], GPU));
        let weight = randn(&[16], GPU);
        transfer::forbid_transfers(|| {
            let forbidden_since = line!() - 1;
            let error = slot.copy_from(&batch).unwrap_err();
            let line = line!() - 1;
            assert_eq!(
                error.to_string(),
                format!(
                    "copy_from: \"batch\" f32[16] on cpu would cross to cuda:0 (64 bytes, tests/transfers.rs:{line}), but \
                     transfers are forbidden since tests/transfers.rs:{forbidden_since}; help: move it before that scope, or wrap \
                     the call in transfer::announced(\"reason\", || …)"
                )
            );
            assert!(
                batch.to(GPU).is_err() && slot.to_vec::<f32>().is_err() && slot.to(OTHER).is_err()
            );
            assert!(
                slot.slice(0..1).unwrap().item().is_err(),
                "reading one number from a GPU is a transfer too"
            );
            assert!(
                batch.slice(0..1).unwrap().item().is_ok(),
                "reading the CPU's own memory is none"
            );
            // A policy that allows a transfer does not announce it.
            let moved = transfer::with_policy(Policy::Allow, || ops::axpy(&weight, 1.0, &batch));
            assert!(matches!(moved, Err(Error::ForbiddenTransfer(_))));
            let moved = transfer::announced("not this", || {
                transfer::with_policy(Policy::Allow, || ops::axpy(&weight, 1.0, &batch))
            });
            assert!(
                matches!(moved, Err(Error::ForbiddenTransfer(_))),
                "an announcement speaks for explicit transfers"
            );
            assert!(Tensor::from_slice(&[1.0f32], &[1], GPU).is_err());
            transfer::announced("the loader's upload", || slot.copy_from(&batch)).unwrap();
            transfer::announced("outer", || {
                transfer::forbid_transfers(|| slot.copy_from(&batch))
            })
            .unwrap_err();
        });
        let rows: Vec<_> = ledger
            .rows()
            .into_iter()
            .filter(|row| row.kind == TransferKind::Upload)
            .collect();
        assert_eq!(
            (rows.len(), rows[0].count, rows[0].announced),
            (1, 1, Some("the loader's upload"))
        );
        slot.copy_from(&batch).unwrap();
    });
}

#[test]
fn the_librarys_threads_inherit_the_rules_and_others_can() {
    on_two_devices(|ledger| {
        let (a, b) = (randn(&[4], GPU), randn(&[4], Device::Cpu));
        transfer::with_policy(Policy::Allow, || {
            transfer::in_phase(Phase::Checkpoint, || {
                let (a, b) = (a.clone(), b.clone());
                transfer::spawn("loader", move || ops::axpy(&a, 1.0, &b))
                    .unwrap()
                    .join()
                    .unwrap()
                    .unwrap();
            });
            let inherited = transfer::inherit(transfer::policy);
            assert_eq!(std::thread::spawn(inherited).join().unwrap(), Policy::Allow);
        });
        let rows = ledger.rows();
        assert_eq!(
            (rows.len(), rows[0].phase, rows[0].count),
            (1, Phase::Checkpoint, 1)
        );
        let (a, b) = (a.clone(), b.clone());
        let strange = std::thread::spawn(move || ops::axpy(&a, 1.0, &b))
            .join()
            .unwrap();
        assert!(
            matches!(strange, Err(Error::DeviceMismatch(_))),
            "a thread that inherits nothing has the default"
        );
    });
}

#[test]
fn the_ledger_tells_kind_bytes_count_line_and_phase_apart() {
    on_two_devices(|ledger| {
        let x = randn(&[10], Device::Cpu);
        let mut lines = Vec::new();
        let on_gpu = x.to(GPU).unwrap();
        lines.push(line!() - 1);
        transfer::in_phase(Phase::Step, || {
            for _ in 0..3 {
                let _ = on_gpu.to(OTHER).unwrap();
            }
        });
        lines.push(line!() - 3);
        transfer::in_phase(Phase::Log, || on_gpu.slice(0..1).unwrap().item().unwrap());
        lines.push(line!() - 1);
        let rows = ledger.rows();
        let seen: Vec<_> = rows
            .iter()
            .map(|r| (r.phase, r.kind, r.source, r.target, r.count, r.bytes))
            .collect();
        assert_eq!(
            seen,
            [
                (Phase::Setup, TransferKind::Upload, Device::Cpu, GPU, 1, 40),
                (Phase::Step, TransferKind::Peer, GPU, OTHER, 3, 120),
                (Phase::Log, TransferKind::ScalarRead, GPU, Device::Cpu, 1, 4),
            ]
        );
        assert_eq!(
            rows.iter().map(|row| row.site.line()).collect::<Vec<_>>(),
            lines
        );
        assert!(
            rows.iter()
                .all(|row| row.site.file() == "tests/transfers.rs")
        );
        assert_eq!(ledger.crossed(), (5, 164));

        let json = ledger.to_json();
        assert_eq!(json["rows"][1]["kind"], "device to device");
        assert_eq!(
            json["rows"][1]["at"],
            format!("tests/transfers.rs:{}", lines[1])
        );
        assert_eq!(json["crossed"]["bytes"], 164);

        let table = ledger.to_string();
        assert!(
            table.contains("device to device") && table.contains("120 B"),
            "{table}"
        );
        ledger.clear();
        assert_eq!(ledger.to_string(), "no transfers\n");
    });
}

/// The patterns of the hints, and how often each was found.
fn found(ledger: &Ledger) -> Vec<(&'static str, u64)> {
    let hints = ledger.hints().into_iter();
    hints.map(|hint| (hint.pattern, hint.count)).collect()
}

#[test]
fn patterns_are_found_and_clean_code_gets_no_hint() {
    on_two_devices(|ledger| {
        let made = Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
        let moved = made.to(GPU).unwrap();
        assert_eq!(found(ledger), [("made only to be moved", 1)]);
        assert!(ledger.hints()[0].to_string().contains("moved to cuda:0"));
        ledger.clear();

        let born_there = randn(&[4], GPU);
        for _ in 0..3 {
            let there = born_there.to(Device::Cpu).unwrap();
            let _back = there.to(GPU).unwrap();
        }
        assert_eq!(found(ledger), [("ping-pong", 3)]);
        assert!(ledger.to_json()["hints"][0]["pattern"] == "ping-pong");
        let hint = &ledger.hints()[0];
        assert!(hint.to_string().contains("data left cuda:0") && hint.lines.len() == 2);
        ledger.clear();

        // Weights that are uploaded, trained and downloaded for saving are not a ping-pong.
        let weights = Tensor::from_slice(&[1.0f32; 4], &[4], GPU).unwrap();
        ops::scale_into(&weights, &weights, 0.9).unwrap();
        let _saved = weights.to(Device::Cpu).unwrap();
        assert!(ledger.hints().is_empty(), "{:?}", ledger.hints());
        ledger.clear();

        let (host, device) = (
            Tensor::from_slice(&[0.5f32; 4], &[4], Device::Cpu).unwrap(),
            moved.empty_like().unwrap(),
        );
        transfer::in_phase(Phase::Step, || {
            for _ in 0..8 {
                device.copy_from(&host).unwrap();
            }
        });
        assert_eq!(found(ledger), [("pageable copies in the step", 8)]);
        assert!(ledger.hints()[0].to_string().contains("8 copies, 128 B"));
        ledger.clear();

        transfer::in_phase(Phase::Step, || {
            (0..8).for_each(|_| _ = device.slice(0..1).unwrap().item().unwrap())
        });
        assert_eq!(found(ledger), [("scalar reads in the step", 8)]);
        ledger.clear();

        // A well-written loop: pinned data from the host in each step; metrics read at log steps.
        let pinned = Tensor::zeros_pinned(&[4], DType::F32).unwrap();
        let stream = Stream::new(GPU).unwrap();
        for _ in 0..20 {
            transfer::in_phase(Phase::Step, || {
                transfer::copy_async(&device, &pinned, &stream)
            })
            .unwrap()
            .wait()
            .unwrap();
            transfer::in_phase(Phase::Log, || device.slice(0..1).unwrap().item()).unwrap();
        }
        let data = Tensor::from_slice(&[1.0f32; 4], &[4], GPU).unwrap();
        let _used = ops::activate(
            &Tensor::ones(&[4], DType::F32, Device::Cpu).unwrap(),
            ops::Activation::Relu,
        )
        .unwrap()
        .to(GPU);
        assert!(
            ledger
                .hints()
                .iter()
                .all(|hint| hint.pattern != "pageable copies in the step")
        );
        assert_eq!(data.device(), GPU);
    });
}

#[test]
fn two_threads_on_the_same_elements_get_an_error_not_a_race() {
    let arena = randn(&[1 << 10], Device::Cpu).named("gradients");
    let (lower, upper) = (
        arena.slice(0..512).unwrap(),
        arena.slice(512..1024).unwrap(),
    );
    lower
        .with_slice_mut::<f32, _>(|_| {
            // Other elements of the same arena are free, these are not.
            std::thread::scope(|scope| {
                scope.spawn(|| ops::scale_into(&upper, &upper, 2.0).unwrap());
                let clash = scope.spawn(|| ops::scale_into(&arena, &arena, 2.0).unwrap_err().to_string());
                let text = clash.join().unwrap();
                assert!(
                    text.contains(
                        r#""gradients" f32[1024] on cpu is being written by with_slice_mut (tests/transfers.rs:"#
                    ),
                    "{text}"
                );
            });
        })
        .unwrap();
    ops::scale_into(&arena, &arena, 0.5).unwrap();
}

#[test]
fn files_reach_devices_only_through_transfer() {
    if !ddp_tests::gpus(1) {
        return;
    }
    let path = std::env::temp_dir().join(format!("ddp-transfers-{}.npy", std::process::id()));
    let ledger = Ledger::new();
    let matrix = Tensor::arange(6, DType::F32, Device::Cuda(0))
        .unwrap()
        .reshape(&[2, 3])
        .unwrap()
        .t()
        .unwrap();
    let load = || Tensor::load_npy(&path, Device::Cuda(0));
    let line = line!() - 1;
    let loaded = transfer::with_ledger(&ledger, || {
        matrix.save_npy(&path)?;
        load()
    });
    let loaded = loaded.unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(
        (loaded.device(), loaded.shape()),
        (Device::Cuda(0), matrix.shape())
    );
    assert_eq!(
        loaded.to_vec::<f32>().unwrap(),
        matrix.to_vec::<f32>().unwrap()
    );
    let mut rows: Vec<_> = ledger
        .rows()
        .iter()
        .map(|row| (row.kind, row.site.line(), row.bytes))
        .collect();
    rows.sort();
    assert_eq!(
        rows,
        [
            (TransferKind::Upload, line, 24),
            (TransferKind::Download, line + 3, 24)
        ]
    );
    assert!(
        ledger.hints().is_empty(),
        "what was saved was used, and a file's data is the host's: {ledger}"
    );
    let error = transfer::forbid_transfers(|| matrix.save_npy(&path))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("save_npy: f32[3, 2] on cuda:0 would cross to cpu"),
        "{error}"
    );
    assert!(!path.exists());
}
