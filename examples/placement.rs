//! The placement tour: 22 situations with a tensor on the wrong device, and the library's messages.
//!
//! `cargo run --release --example placement`. Every line is asserted, so the tour is a test as
//! well. Situations that need GPUs that are not there are skipped and counted.

use std::time::Instant;

use ddp::kernels::device::{self, Device};
use ddp::kernels::memory;
use ddp::kernels::ops::{self, CrossEntropyOptions, CrossEntropyOut};
use ddp::kernels::stream::{self, Stream, Timer};
use ddp::kernels::transfer::{self, Ledger, Phase, Policy, TransferKind};
use ddp::kernels::{DType, Error, Random, Result, Tensor};

/// The first GPU, where a situation has one.
const GPU: Device = Device::Cuda(0);
/// The second one.
const OTHER_GPU: Device = Device::Cuda(1);

/// How many GPUs a situation needs to be shown.
type Gpus = usize;

struct Situation {
    title: &'static str,
    needs: Gpus,
    /// Shows it, asserts it, and says in a line or more what was seen.
    show: fn() -> Result<String>,
}

const fn situation(title: &'static str, needs: Gpus, show: fn() -> Result<String>) -> Situation {
    Situation { title, needs, show }
}

const SITUATIONS: [Situation; 22] = [
    situation(
        "addmm across devices is an error that names every operand",
        1,
        addmm_across_devices,
    ),
    situation("moved first, it works", 1, moved_first),
    situation(
        "an operand on a second GPU comes by peer copy",
        2,
        operand_on_second_gpu,
    ),
    situation(
        "batches on the CPU, model on the GPU: forbid, warn, allow",
        1,
        batches_on_the_cpu,
    ),
    situation(
        "a dataset resident on the device: one upload, none in the loop",
        1,
        resident_dataset,
    ),
    situation(
        "pinned memory: copies overlap computing",
        1,
        overlapped_copies,
    ),
    situation(
        "made on the host, then moved: the hint",
        1,
        made_on_the_host,
    ),
    situation(
        "a model moves; what was left behind is found by name",
        1,
        model_moves_whole,
    ),
    situation(
        "a causal mask moves with its model",
        0,
        causal_mask_as_buffer,
    ),
    situation(
        "item() in the loop is counted with its line",
        0,
        item_in_the_loop,
    ),
    situation("ping-pong is detected", 1, ping_pong),
    situation("a .npy file from a tensor on the GPU", 1, npy_from_gpu),
    situation(
        "timing an asynchronous operation, wrongly and rightly",
        1,
        timing,
    ),
    situation(
        "memory: allocated, reserved, empty_cache",
        0,
        memory_figures,
    ),
    situation("device-agnostic helper code", 0, device_agnostic),
    situation(
        "shape, dtype and device together; every tensor by device",
        0,
        listed_by_device,
    ),
    situation("adding tensors of two GPUs", 2, tensors_of_two_gpus),
    situation(
        "an accelerator that is not supported",
        0,
        unsupported_accelerator,
    ),
    situation("discovery: what this machine has", 0, discovery),
    situation(
        "out of memory on one side while the other has room",
        0,
        out_of_memory,
    ),
    situation(
        "labels, loss weights, a cached state left on the other device",
        1,
        left_on_the_other_device,
    ),
    situation(
        "an operation without a version for the device",
        0,
        no_version,
    ),
];

fn main() -> std::process::ExitCode {
    let gpus = Device::usable().len() - 1;
    for gpu in device::discover().gpus.iter().take(gpus) {
        println!("{gpu}");
    }
    let (mut shown, mut skipped, mut failed) = (0, 0, 0);
    for (index, situation) in SITUATIONS.iter().enumerate() {
        let number = index + 1;
        if gpus < situation.needs {
            let plural = if situation.needs == 1 { "" } else { "s" };
            println!(
                "{number}. needs {} CUDA device{plural}: skipped\n     ({})",
                situation.needs, situation.title
            );
            skipped += 1;
            continue;
        }
        match transfer::with_ledger(&Ledger::new(), situation.show) {
            Ok(seen) => {
                println!("{number}. {}", situation.title);
                seen.trim_end()
                    .lines()
                    .for_each(|line| println!("     {line}"));
                shown += 1;
            }
            Err(error) => {
                println!("{number}. {}\n     FAILED: {error}", situation.title);
                failed += 1;
            }
        }
    }
    println!(
        "situations: {}, shown: {shown}, skipped: {skipped}",
        SITUATIONS.len()
    );
    if failed > 0 {
        std::process::ExitCode::from(70)
    } else {
        std::process::ExitCode::SUCCESS
    }
}

/// The ledger of the situation being shown.
fn ledger() -> std::sync::Arc<Ledger> {
    Ledger::current()
}

#[track_caller]
fn randn(shape: &[usize], device: Device) -> Result<Tensor> {
    Tensor::randn(shape, DType::F32, device, &mut Random::new(1))
}

/// The message of what must fail.
fn message<T>(outcome: Result<T>) -> String {
    outcome.err().expect("this must be refused").to_string()
}

fn addmm_across_devices() -> Result<String> {
    let acc = Tensor::zeros(&[1000, 1000], DType::F32, Device::Cpu)?;
    let mat1 = randn(&[1000, 1000], Device::Cpu)?;
    let mat2 = randn(&[1000, 1000], GPU)?.named("w");
    let text = message(ops::addmm(&acc, &mat1, &mat2, 1.0, 1.0));
    let line = line!() - 1;
    assert_eq!(
        text,
        format!(
            "addmm: operands are on different devices: acc f32[1000, 1000] on cpu, mat1 f32[1000, 1000] on cpu, \
             mat2 \"w\" f32[1000, 1000] on cuda:0 (examples/placement.rs:{line}); help: move mat2 with .to(Device::Cpu), or \
             acc and mat1 with .to(Device::Cuda(0))"
        )
    );
    assert_eq!(
        ledger().crossed(),
        (0, 0),
        "a refused operation moves nothing"
    );
    Ok(text)
}

fn moved_first() -> Result<String> {
    let acc = Tensor::zeros(&[64, 64], DType::F32, Device::Cpu)?;
    let (mat1, mat2) = (randn(&[64, 64], Device::Cpu)?, randn(&[64, 64], GPU)?);
    let out = ops::addmm(&acc.to(GPU)?, &mat1.to(GPU)?, &mat2, 1.0, 1.0)?;
    assert_eq!(out.device(), GPU);
    assert_eq!(ledger().crossed(), (2, 2 * 64 * 64 * 4));
    Ok(format!("{out}\n{}", ledger()))
}

fn operand_on_second_gpu() -> Result<String> {
    let (acc, mat1) = (
        Tensor::zeros(&[64, 64], DType::F32, GPU)?,
        randn(&[64, 64], GPU)?,
    );
    let mat2 = randn(&[64, 64], OTHER_GPU)?;
    let out = ops::addmm(&acc, &mat1, &mat2.to(GPU)?, 1.0, 1.0)?;
    assert_eq!(out.device(), GPU);
    let rows = ledger().rows();
    assert!(
        matches!(&rows[..], [row] if row.bytes == 16384 && matches!(row.kind, TransferKind::Peer | TransferKind::Staged))
    );
    Ok(ledger().to_string())
}

fn batches_on_the_cpu() -> Result<String> {
    let weight = randn(&[10, 32], GPU)?.named("fc.weight");
    let batch = randn(&[8, 32], Device::Cpu)?.named("batch");
    let logits = Tensor::zeros(&[8, 10], DType::F32, GPU)?;
    let step = || ops::linear_into(&logits, &batch, &weight, None, None, None);
    let forbidden = message(step());
    assert!(
        forbidden.contains(r#"x "batch" f32[8, 32] on cpu"#),
        "{forbidden}"
    );
    transfer::with_policy(Policy::Warn, || (0..3).try_for_each(|_| step()))?;
    transfer::with_policy(Policy::Allow, || (0..3).try_for_each(|_| step()))?;
    let rows = ledger().rows();
    assert!(
        rows.iter()
            .all(|row| row.implicit && row.kind == TransferKind::Upload)
    );
    assert_eq!(rows.iter().map(|row| row.count).sum::<u64>(), 6);
    Ok(format!(
        "forbid: {forbidden}\nwarn, then allow, three steps each (one warning on standard error):\n{}",
        ledger()
    ))
}

fn resident_dataset() -> Result<String> {
    let dataset = randn(&[1024, 32], Device::Cpu)?.to(GPU)?;
    let weight = randn(&[10, 32], GPU)?;
    let logits = Tensor::zeros(&[128, 10], DType::F32, GPU)?;
    transfer::in_phase(Phase::Step, || {
        transfer::forbid_transfers(|| {
            (0..8).try_for_each(|batch| {
                let rows = dataset.slice(batch * 128..(batch + 1) * 128)?;
                ops::linear_into(&logits, &rows, &weight, None, None, None)
            })
        })
    })?;
    assert_eq!(ledger().crossed(), (1, 1024 * 32 * 4));
    Ok(format!(
        "8 steps with transfers forbidden; the ledger knows one upload:\n{}",
        ledger()
    ))
}

fn overlapped_copies() -> Result<String> {
    let (copies, compute) = (Stream::new(GPU)?, Stream::new(GPU)?);
    let shape = large();
    let host = Tensor::zeros_pinned(&shape, DType::F32)?;
    let (a, target) = (randn(&shape, GPU)?, Tensor::zeros(&shape, DType::F32, GPU)?);
    let out = a.zeros_like()?;
    let time_with = |copies: &Stream| -> Result<f64> {
        stream::synchronize(GPU)?;
        let start = compute.record_timed()?;
        copies.wait(&start)?;
        let copy = transfer::copy_async(&target, &host, copies)?;
        compute.scope(|| ops::addmm_into(&out, &out, &a, &a, 1.0, 0.0))?;
        compute.wait(copy.event())?;
        // The time between two events is the device's and does not depend on the host.
        let elapsed = compute.record_timed()?.since(&start)?;
        copy.wait()?;
        Ok(elapsed.as_secs_f64())
    };
    time_with(&compute)?; // the first matmul compiles and plans
    let (in_turn_s, overlapped_s) = (time_with(&compute)?, time_with(&copies)?);
    assert!(
        overlapped_s < in_turn_s,
        "a copy on its own stream overlaps the matmul"
    );
    if simulated() {
        return Ok(
            "overlapped they take less time than one after the other (by the simulator's clock)"
                .to_string(),
        );
    }
    Ok(format!(
        "one after the other {:.2} ms, overlapped {:.2} ms",
        in_turn_s * 1e3,
        overlapped_s * 1e3
    ))
}

/// The shape of a matrix: its product takes a GPU longer than a launch. The simulator is slower.
fn large() -> [usize; 2] {
    [if simulated() { 256 } else { 2048 }; 2]
}

/// Whether the GPU is one of the simulator's, whose times mean nothing.
fn simulated() -> bool {
    device::discover()
        .gpus
        .first()
        .is_some_and(|gpu| gpu.name.contains("Simulated"))
}

fn made_on_the_host() -> Result<String> {
    let noise = Tensor::randn(&[256, 256], DType::F32, Device::Cpu, &mut Random::new(2))?;
    let noise = noise.to(GPU)?;
    let hints = ledger().hints();
    assert!(hints.len() == 1, "{hints:?}");
    assert_eq!(
        (hints[0].pattern, hints[0].count),
        ("made only to be moved", 1)
    );
    let better = Tensor::randn(&[256, 256], DType::F32, GPU, &mut Random::new(2))?;
    assert_eq!(
        better.to_vec::<f32>()?,
        noise.to_vec::<f32>()?,
        "the same numbers wherever they are made"
    );
    Ok(hints[0].to_string())
}

/// Live tensors on `device` whose names begin with `prefix`, and where each was made.
fn named_on(device: Device, prefix: &str) -> Vec<String> {
    let live = memory::largest_live(device, usize::MAX).into_iter();
    let named = live.filter(|live| {
        let name = live.tensor.name.as_deref();
        name.is_some_and(|name| name.starts_with(prefix))
    });
    named.map(|live| live.to_string()).collect()
}

fn model_moves_whole() -> Result<String> {
    let model = [
        randn(&[10, 32], Device::Cpu)?.named("model.fc.weight"),
        Tensor::zeros(&[10], DType::F32, Device::Cpu)?.named("model.fc.bias"),
    ];
    // Made beside the list that moves.
    let mask = causal_mask(8)?.named("model.mask");
    let model = model.map(|tensor| tensor.to(GPU));
    for tensor in model {
        assert_eq!(tensor?.device(), GPU);
    }
    let left = named_on(Device::Cpu, "model.");
    assert!(
        left.len() == 1 && left[0].contains("model.mask"),
        "{left:?}"
    );
    drop(mask);
    assert!(named_on(Device::Cpu, "model.").is_empty());
    Ok(format!("left behind: {}", left[0]))
}

fn causal_mask_as_buffer() -> Result<String> {
    let mask = causal_mask(4)?.named("attention.mask").to(Device::best())?;
    let scores = Tensor::zeros(&[4, 4], DType::F32, Device::best())?;
    ops::axpy(&scores, 1.0, &mask)?;
    let masked = scores.to_vec::<f32>()?;
    let expected = |index: usize| {
        if index % 4 > index / 4 {
            f32::NEG_INFINITY
        } else {
            0.0
        }
    };
    assert!(
        masked
            .iter()
            .enumerate()
            .all(|(index, &value)| value == expected(index))
    );
    Ok(format!(
        "{mask} moved with the model and met the scores there"
    ))
}

fn item_in_the_loop() -> Result<String> {
    let loss = Tensor::full(&[1], 0.25, DType::F32, Device::best())?.named("loss");
    let mut total = 0.0;
    transfer::in_phase(Phase::Step, || {
        for _ in 0..100 {
            total += loss.item()?;
        }
        Ok::<(), Error>(())
    })?;
    let line = line!() - 4;
    assert_eq!(total, 25.0);
    let hints = ledger().hints();
    let text = hints[0].to_string();
    assert!(
        text.contains(&format!("examples/placement.rs:{line} ran 100 times")),
        "{text}"
    );
    Ok(text)
}

fn ping_pong() -> Result<String> {
    let weight = randn(&[32, 32], GPU)?;
    let mut state = randn(&[8, 32], GPU)?;
    for _ in 0..5 {
        let output = state.new_empty(&[8, 32])?;
        ops::linear_into(
            &output,
            &state,
            &weight,
            None,
            Some(ops::Activation::Relu),
            None,
        )?;
        let on_host = output.to(Device::Cpu)?;
        state = on_host.to(GPU)?;
    }
    let hints = ledger().hints();
    let mut found = hints.iter();
    let found = found.find(|hint| (hint.pattern, hint.count) == ("ping-pong", 5));
    Ok(found.expect("the ledger sees the return").to_string())
}

fn npy_from_gpu() -> Result<String> {
    let tensor = randn(&[3, 4], GPU)?.named("embedding");
    let path = std::env::temp_dir().join(format!("placement-{}.npy", std::process::id()));
    tensor.save_npy(&path)?;
    let back = Tensor::load_npy(&path, Device::Cpu)?;
    let kinds: Vec<TransferKind> = ledger().rows().iter().map(|row| row.kind).collect();
    assert_eq!(
        kinds,
        [TransferKind::Download],
        "the copy to the host is counted, not hidden"
    );
    assert_eq!(back.to_vec::<f32>()?, tensor.to_vec::<f32>()?);
    // Only the example's own file; a failure to remove it is of no consequence.
    let _ = std::fs::remove_file(path);
    Ok(format!("saved {tensor}, read back as {back}\n{}", ledger()))
}

fn timing() -> Result<String> {
    let a = randn(&large(), GPU)?;
    let out = a.zeros_like()?;
    ops::addmm_into(&out, &out, &a, &a, 1.0, 0.0)?;
    stream::synchronize(GPU)?;
    let start = Instant::now();
    ops::addmm_into(&out, &out, &a, &a, 1.0, 0.0)?;
    let wrong_s = start.elapsed().as_secs_f64();
    let timer = Timer::start(GPU)?;
    ops::addmm_into(&out, &out, &a, &a, 1.0, 0.0)?;
    let right_s = timer.elapsed()?.as_secs_f64();
    if simulated() {
        // The simulator's clock cannot be compared with the host's.
        assert!(right_s > 0.0, "a matmul takes time");
        return Ok(
            "without waiting, only the launch is measured; with a Timer, the work".to_string(),
        );
    }
    assert!(
        wrong_s < right_s,
        "without waiting, only the launch is measured"
    );
    Ok(format!(
        "without waiting {:.3} ms (the launch), with a Timer {:.3} ms (the work)",
        wrong_s * 1e3,
        right_s * 1e3
    ))
}

fn memory_figures() -> Result<String> {
    let device = Device::best();
    memory::empty_cache(device);
    let before = memory::stats(device);
    let tensor = Tensor::zeros(&[1 << 20], DType::F32, device)?;
    let during = memory::stats(device);
    drop(tensor);
    let after = memory::stats(device);
    let given_back = memory::empty_cache(device);
    assert_eq!(during.allocated_bytes - before.allocated_bytes, 4 << 20);
    assert_eq!(
        after.allocated_bytes, before.allocated_bytes,
        "dropped: no longer allocated"
    );
    assert_eq!(
        after.reserved_bytes, during.reserved_bytes,
        "but kept for reuse"
    );
    let emptied = memory::stats(device);
    // A GPU's driver gives back whole pieces of 32 MiB, if no tensor is left in them.
    assert!(given_back >= 4 << 20 || device.is_accelerator());
    assert_eq!(emptied.reserved_bytes + given_back, after.reserved_bytes);
    Ok(format!(
        "with the tensor: {during}\nafter drop:      {after}\nafter empty_cache: {emptied}"
    ))
}

/// Works wherever its input is: the helper tensor inherits device and dtype.
fn normalize(x: &Tensor) -> Result<Tensor> {
    let mean = ops::mean(x)?;
    let centred = x.new_full(x.shape(), -mean.item()?)?;
    ops::axpy(&centred, 1.0, x)?;
    Ok(centred)
}

fn device_agnostic() -> Result<String> {
    let mut lines = Vec::new();
    for device in Device::usable() {
        let centred = normalize(&Tensor::arange(5, DType::F32, device)?)?;
        assert_eq!(
            (centred.device(), centred.to_vec::<f32>()?),
            (device, vec![-2.0, -1.0, 0.0, 1.0, 2.0])
        );
        lines.push(format!("normalize on {device}: {centred}"));
    }
    Ok(lines.join("\n"))
}

fn listed_by_device() -> Result<String> {
    let weight = randn(&[16, 8], Device::best())?.named("mlp.0.weight");
    let _steps = Tensor::zeros(&[1], DType::I64, Device::Cpu)?.named("mlp.steps");
    assert_eq!(
        weight.to_string(),
        format!("\"mlp.0.weight\" f32[16, 8] on {}", Device::best())
    );
    let mut lines = Vec::new();
    for device in Device::usable() {
        lines.extend(named_on(device, "mlp."));
    }
    assert_eq!(lines.len(), 2);
    Ok(lines.join("\n"))
}

fn tensors_of_two_gpus() -> Result<String> {
    let (a, b) = (
        randn(&[4], GPU)?.named("x0"),
        randn(&[4], OTHER_GPU)?.named("x1"),
    );
    let text = message(ops::axpy(&a, 1.0, &b));
    assert!(
        text.contains(r#"y "x0" f32[4] on cuda:0, x "x1" f32[4] on cuda:1"#),
        "{text}"
    );
    ops::axpy(&a, 1.0, &b.to(GPU)?)?;
    Ok(text)
}

fn unsupported_accelerator() -> Result<String> {
    let mut lines = Vec::new();
    for name in ["mps", "xpu", "rocm"] {
        let text = message(name.parse::<Device>());
        assert!(
            text.contains("supported: cpu, cuda, cuda:N, auto"),
            "{text}"
        );
        lines.push(text);
    }
    let beyond = Device::Cuda(99);
    let text = message(Tensor::zeros(&[1], DType::F32, beyond));
    assert!(text.contains("zeros: cuda:99 is not available"), "{text}");
    lines.push(text);
    Ok(lines.join("\n"))
}

fn discovery() -> Result<String> {
    let found = device::discover();
    assert_eq!(
        found.gpus.is_empty(),
        found.why_no_gpu.is_some(),
        "no GPU never goes without a reason"
    );
    Ok(format!("{found}\nusable here: {:?}", Device::usable()))
}

fn out_of_memory() -> Result<String> {
    let mut lines = Vec::new();
    for device in Device::usable() {
        let big = Tensor::zeros(&[8 << 20], DType::U8, device)?.named("activations");
        memory::empty_cache(device);
        let limit_bytes = memory::stats(device).reserved_bytes + (16 << 20);
        memory::set_limit_bytes(device, Some(limit_bytes));
        let text = message(Tensor::zeros(&[64 << 20], DType::U8, device));
        memory::set_limit_bytes(device, None);
        assert!(
            text.contains(&format!("out of memory on {device}")) && text.contains("activations"),
            "{text}"
        );
        lines.push(text);
        drop(big);
        for other in Device::usable()
            .into_iter()
            .filter(|other| *other != device)
        {
            let there = Tensor::zeros(&[64 << 20], DType::U8, other)?;
            lines.push(format!("{other} had room for {there}"));
        }
    }
    Ok(lines.join("\n"))
}

fn left_on_the_other_device() -> Result<String> {
    let logits = randn(&[4, 3], GPU)?.named("logits");
    let losses = logits.new_zeros(&[4])?;
    let labels = Tensor::from_slice(&[0i64, 1, 2, 0], &[4], Device::Cpu)?.named("labels");
    let class_weights = Tensor::ones(&[3], DType::F32, Device::Cpu)?.named("class_weights");
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: None,
        weights: None,
    };
    let plain = CrossEntropyOptions::default();
    let weighted = CrossEntropyOptions {
        class_weights: Some(&class_weights),
        ..plain
    };
    let labels_text = message(ops::cross_entropy(&logits, &labels, out, &plain, None));
    assert!(
        labels_text.contains(r#"targets "labels" i64[4] on cpu"#),
        "{labels_text}"
    );
    let labels = labels.to(GPU)?;
    let weights_text = message(ops::cross_entropy(&logits, &labels, out, &weighted, None));
    assert!(
        weights_text.contains(r#""class_weights" f32[3] on cpu"#),
        "{weights_text}"
    );
    let cached = Tensor::zeros(&[4, 3], DType::F32, Device::Cpu)?.named("hidden");
    let cached_text = message(ops::axpy(&logits, 1.0, &cached));
    assert!(
        cached_text.contains(r#"x "hidden" f32[4, 3] on cpu"#),
        "{cached_text}"
    );
    Ok(format!("{labels_text}\n{weights_text}\n{cached_text}"))
}

fn no_version() -> Result<String> {
    // On the CPU f16 is for storage and casts; on a GPU f64 is for storage alone.
    let (device, dtype) = match Device::best() {
        Device::Cpu => (Device::Cpu, DType::F16),
        gpu => (gpu, DType::F64),
    };
    let x = Tensor::ones(&[2, 2], dtype, device)?.named("x");
    let text = message(ops::addmm(&x, &x, &x, 1.0, 1.0));
    assert!(
        text.contains(&format!(
            "addmm: there is no version for {dtype} on {device}: mat1 \"x\""
        )),
        "{text}"
    );
    Ok(text)
}

/// 0 on and below the diagonal, -∞ above it: no token sees a later one.
#[track_caller]
fn causal_mask(tokens: usize) -> Result<Tensor> {
    let hides = |index: usize| index % tokens > index / tokens;
    let values: Vec<f32> = (0..tokens * tokens)
        .map(|index| if hides(index) { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    Tensor::from_slice(&values, &[tokens, tokens], Device::Cpu)
}
