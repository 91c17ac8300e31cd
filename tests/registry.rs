//! A model that moves as a whole between devices, and what it leaves behind. It needs two GPUs,
//! real or simulated. All tests share them, so each test uses another prefix; `cuda:1` has little
//! memory, which only one of them uses.

use ddp_kernels::registry::{Registry, Role};
use ddp_kernels::transfer::{self, Ledger, TransferKind};
use ddp_kernels::{DType, Device, Error, Tensor, memory};

const FIRST: Device = Device::Cuda(0);
const SECOND: Device = Device::Cuda(1);

/// Whether there are two GPUs; limits the memory of the second one.
fn two_gpus() -> bool {
    let enough = ddp_tests::gpus(2);
    if enough {
        memory::set_limit_bytes(SECOND, Some(256 << 10));
    }
    enough
}

fn numbers(shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    Tensor::arange(count, DType::F32, Device::Cpu)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

fn devices(registry: &Registry) -> Vec<Device> {
    registry
        .iter()
        .map(|entry| entry.tensor().device())
        .collect()
}

#[test]
fn everything_moves_and_each_move_is_counted_at_the_callers_line() {
    if !two_gpus() {
        return;
    }
    let mut model = Registry::new("moves");
    model.parameter("w", numbers(&[2, 3])).unwrap();
    model
        .parameter("w_t", numbers(&[4, 2]).t().unwrap())
        .unwrap();
    model.buffer("mask", numbers(&[])).unwrap();
    model.buffer("empty", numbers(&[0, 3])).unwrap();
    let ledger = Ledger::new();
    let line = line!() + 1;
    transfer::with_ledger(&ledger, || model.to(FIRST)).unwrap();
    assert_eq!(devices(&model), [FIRST; 4]);
    assert_eq!(ledger.crossed(), (4, 4 * (6 + 8 + 1)));
    for row in ledger.rows() {
        assert_eq!(
            (row.kind, row.site.file(), row.site.line()),
            (TransferKind::Upload, file!(), line)
        );
    }
    let w_t = model.get("w_t").unwrap();
    assert_eq!(
        (w_t.name(), w_t.is_transposed(), w_t.shape().dims()),
        (Some("moves.w_t"), true, &[2, 4][..])
    );
    assert_eq!(
        w_t.to_vec::<f32>().unwrap(),
        [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    );
    // Again: nothing is left to move.
    transfer::with_ledger(&ledger, || model.to(FIRST)).unwrap();
    assert_eq!(ledger.crossed().0, 4);
    transfer::with_ledger(&ledger, || model.to(Device::Cpu)).unwrap();
    assert_eq!(
        (ledger.crossed().0, devices(&model)),
        (8, vec![Device::Cpu; 4])
    );
    assert_eq!(
        model.get("w").unwrap().to_vec::<f32>().unwrap(),
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    );
}

#[test]
fn on_an_error_nothing_has_moved() {
    if !two_gpus() {
        return;
    }
    let mut model = Registry::new("whole");
    model.parameter("small", numbers(&[8])).unwrap();
    model.parameter("large", numbers(&[128 << 10])).unwrap();
    let old = model.get("small").unwrap().clone();
    let error = model.to(SECOND).unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory(memory) if memory.at.file() == file!()),
        "{error}"
    );
    assert!(error.to_string().contains("\"whole.large\""), "{error}");
    assert_eq!(devices(&model), [Device::Cpu; 2]);
    assert!(model.get("small").unwrap().shares_memory_with(&old));
    assert_eq!(model.home(), Some(Device::Cpu));
    let error = transfer::forbid_transfers(|| model.to(FIRST))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("\"whole.small\"") && error.contains("transfers are forbidden since"),
        "{error}"
    );
    assert_eq!(devices(&model), [Device::Cpu; 2]);
    assert!(
        model.left_behind().is_empty(),
        "the copies that had arrived are gone: {:?}",
        model.left_behind()
    );
}

#[test]
fn two_ranks_in_one_process_do_not_see_each_others_model() {
    if !two_gpus() {
        return;
    }
    let mut ranks = [FIRST, SECOND].map(|device| {
        let mut model = Registry::new("rank");
        model.parameter("w", numbers(&[8])).unwrap();
        model.to(device).unwrap();
        Some(model)
    });
    let left = |rank: &Option<Registry>| rank.as_ref().unwrap().left_behind().len();
    assert_eq!([left(&ranks[0]), left(&ranks[1])], [0, 0]);
    // A registry that is gone leaves its tensors to be found, if something still holds them.
    let kept = ranks[1].take().unwrap().get("w").unwrap().clone();
    assert_eq!(left(&ranks[0]), 1);
    drop(kept);
    assert_eq!(left(&ranks[0]), 0);
}

#[test]
fn tied_weights_stay_tied_and_move_once() {
    if !two_gpus() {
        return;
    }
    let embedding = numbers(&[4, 3]);
    let mut model = Registry::new("tied");
    model.parameter("head", embedding.t().unwrap()).unwrap();
    model.parameter("embedding", embedding.clone()).unwrap();
    model.parameter("alias", embedding).unwrap();
    let ledger = Ledger::new();
    transfer::with_ledger(&ledger, || model.to(FIRST)).unwrap();
    assert_eq!(ledger.crossed(), (1, 48));
    let [head, embedding, alias] =
        ["head", "embedding", "alias"].map(|name| model.get(name).unwrap());
    assert!(head.shares_memory_with(embedding) && head.shares_memory_with(alias));
    assert_eq!(
        (head.name(), alias.name()),
        (Some("tied.head"), Some("tied.alias"))
    );
    assert_eq!(
        (head.shape().dims(), head.is_transposed()),
        (&[3, 4][..], true)
    );
    assert_eq!(
        (embedding.shape().dims(), embedding.is_transposed()),
        (&[4, 3][..], false)
    );
    assert_eq!(
        embedding.to_vec::<f32>().unwrap(),
        numbers(&[12]).to_vec::<f32>().unwrap()
    );
    assert_eq!(
        head.to_vec::<f32>().unwrap(),
        numbers(&[4, 3])
            .t()
            .unwrap()
            .contiguous()
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    );
    assert!(model.left_behind().is_empty());
}

#[test]
fn slices_of_a_registered_arena_stay_slices_of_it() {
    if !two_gpus() {
        return;
    }
    let arena = numbers(&[10]);
    let mut model = Registry::new("arena");
    model
        .parameter(
            "a",
            arena
                .slice(0..6)
                .unwrap()
                .reshape(&[2, 3])
                .unwrap()
                .t()
                .unwrap(),
        )
        .unwrap();
    model.parameter("b", arena.slice(6..10).unwrap()).unwrap();
    model
        .parameter("nothing", arena.slice(3..3).unwrap())
        .unwrap();
    model.buffer("all", arena.clone()).unwrap();
    model.to(FIRST).unwrap();
    assert_eq!(devices(&model), [FIRST; 4]);
    let [a, b, all] = ["a", "b", "all"].map(|name| model.get(name).unwrap());
    assert!(a.shares_memory_with(all) && b.shares_memory_with(all) && !a.shares_memory_with(b));
    assert_eq!(a.to_vec::<f32>().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(b.to_vec::<f32>().unwrap(), [6.0, 7.0, 8.0, 9.0]);
    // Slices share memory after the move even if the arena itself is not registered.
    let mut parts = Registry::new("parts");
    parts.parameter("a", arena.slice(0..6).unwrap()).unwrap();
    parts.parameter("b", arena.slice(5..10).unwrap()).unwrap();
    parts.to(FIRST).unwrap();
    let [a, b] = ["a", "b"].map(|name| parts.get(name).unwrap());
    assert!(a.shares_memory_with(b));
    assert_eq!(b.to_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 8.0, 9.0]);
}

#[test]
fn a_mask_that_was_never_registered_is_found_by_its_name() {
    if !two_gpus() {
        return;
    }
    let mut model = Registry::new("found");
    model.parameter("w", numbers(&[8, 8])).unwrap();
    let line = line!() + 1;
    let mask = Tensor::ones(&[8, 8], DType::F32, Device::Cpu)
        .unwrap()
        .named("found.mask");
    let _stranger = numbers(&[1]).named("founder.mask");
    let _nameless = numbers(&[1]);
    assert!(model.left_behind().is_empty(), "everything is on the CPU");
    model.to(FIRST).unwrap();
    let left: Vec<String> = model
        .left_behind()
        .iter()
        .map(ToString::to_string)
        .collect();
    let place = format!("{}:{line}", file!());
    let expected = format!(
        "\"found.mask\" f32[8, 8] on cpu, made at {place}, was left behind; help: register it as a buffer, so that \
         it moves with found"
    );
    assert_eq!(left, [expected]);
    model.buffer("mask", mask).unwrap();
    let left = model.left_behind();
    assert!(left.len() == 1, "{left:?}");
    assert!(
        left[0]
            .to_string()
            .ends_with("help: move it with to(Device::Cuda(0))"),
        "{}",
        left[0]
    );
    model.to(FIRST).unwrap();
    assert!(model.left_behind().is_empty());
}

#[test]
fn a_handle_kept_from_before_the_move_is_found() {
    if !two_gpus() {
        return;
    }
    let mut model = Registry::new("kept");
    model.parameter("w", numbers(&[8])).unwrap();
    let kept_by_the_optimizer = model.get("w").unwrap().clone();
    model.to(FIRST).unwrap();
    let left = model.left_behind();
    assert_eq!(left.len(), 1, "{left:?}");
    let text = left[0].to_string();
    assert!(
        text.contains("use the registered tensor of that name"),
        "{text}"
    );
    drop(kept_by_the_optimizer);
    assert!(model.left_behind().is_empty());
}

#[test]
fn the_table_is_grouped_by_device_and_the_majority_of_bytes_is_home() {
    if !two_gpus() {
        return;
    }
    let mut model = Registry::new("table");
    model
        .parameter("w", numbers(&[8, 8]).to(FIRST).unwrap())
        .unwrap();
    model.buffer("mask", numbers(&[8])).unwrap();
    model
        .parameter("tied", model.get("w").unwrap().clone())
        .unwrap();
    let expected = "\
role       name        dtype  shape   device        bytes
buffer     table.mask  f32    [8]     cpu            32 B
on cpu: 1 tensor, 32 B
parameter  table.w     f32    [8, 8]  cuda:0        256 B
parameter  table.tied  f32    [8, 8]  cuda:0        256 B
on cuda:0: 2 tensors, 256 B
";
    assert_eq!(model.to_string(), expected);
    assert_eq!(model.home(), Some(FIRST));
    let by_device = model.by_device();
    assert_eq!(
        by_device
            .iter()
            .map(|(device, entries)| (*device, entries.len()))
            .collect::<Vec<_>>(),
        [(Device::Cpu, 1), (FIRST, 2)]
    );
    assert_eq!(by_device[0].1[0].role(), Role::Buffer);
    let left = model.left_behind();
    assert!(left.len() == 1 && left[0].live.tensor.name.as_deref() == Some("table.mask"));
}

#[test]
fn files_reach_devices_only_through_transfer() {
    if !two_gpus() {
        return;
    }
    let path = std::env::temp_dir().join(format!("ddp-registry-{}.npy", std::process::id()));
    let ledger = Ledger::new();
    let matrix = Tensor::arange(6, DType::F32, FIRST)
        .unwrap()
        .reshape(&[2, 3])
        .unwrap()
        .t()
        .unwrap();
    let line = line!() + 1;
    transfer::with_ledger(&ledger, || matrix.save_npy(&path)).unwrap();
    let loaded = transfer::with_ledger(&ledger, || Tensor::load_npy(&path, FIRST)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!((loaded.device(), loaded.shape()), (FIRST, matrix.shape()));
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
            (TransferKind::Upload, line + 1, 24),
            (TransferKind::Download, line, 24)
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
