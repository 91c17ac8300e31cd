//! Batches on GPUs: the same bits by every path, what crosses, what is kept, and what waits for
//! what.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use ddp::config::{GraphChoice, Resident};
use ddp::data::{Batch, Dataset, InOrder, Loader, Sampler, Source, TaskSpec, read_rows};
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::{Ledger, TransferKind, with_ledger};
use ddp_kernels::{DType, Device, Tensor, memory, stream};

use crate::support::lines::Lines;
use crate::support::random::uniform;
use crate::support::training::{Rows, quietly};
use crate::{Gpu, Setup, Training, gpu, is_simulated, simulated_gpu_of};

/// Rows of a row of `width` numbers, drawn, whose target is a class or three numbers.
fn data(rows: u64, width: usize, classes: bool) -> Arc<dyn Dataset> {
    let task = if classes {
        let names = ["a", "b", "c"].map(String::from).into();
        TaskSpec::named_classes(names)
    } else {
        TaskSpec::Regression { outputs: 3 }
    };
    Arc::new(Rows::new(rows, width, task, uniform))
}

/// Whole numbers in two dimensions, with a target for each line.
fn lines(rows: u64) -> Arc<dyn Dataset> {
    Arc::new(Lines::new(rows))
}

/// The devices of a batch: one, and where there are two GPUs also two.
fn places(gpu: &Gpu) -> Vec<[Device; 2]> {
    let other = Device::usable()
        .into_iter()
        .rfind(|device| device.is_accelerator());
    let mut places = vec![[gpu.device; 2]];
    places.extend(
        other
            .filter(|&other| other != gpu.device)
            .map(|other| [gpu.device, other]),
    );
    places
}

/// A batch: its places in the run and the global batch, and the bits of inputs and targets,
/// micro-batch by micro-batch.
fn contents(batch: &Batch) -> ([u64; 4], usize, Vec<u64>, Vec<u64>) {
    let (mut x, mut targets) = (Vec::new(), Vec::new());
    for index in 0..batch.micro_count() {
        let micro = batch.micro(index).unwrap();
        x.extend(bits(&micro.x));
        targets.extend(bits(&micro.targets));
    }
    (
        [batch.step, batch.epoch, batch.rows, batch.first],
        batch.mine,
        x,
        targets,
    )
}

#[test]
fn every_batch_has_the_same_bits_on_every_way() {
    let Some(gpu) = gpu() else { return };
    // Epochs of five batches of 8 and one of 3: three ranks have unequal shares, and with four one
    // has no row of the short batch.
    const ROWS: u64 = 43;
    let sampler = Sampler::new(ROWS, 8, 3, false).unwrap();
    let all = [data(ROWS, 5, true), data(ROWS, 12, false), lines(ROWS)];
    for data in all {
        let sources = places(&gpu).into_iter().flat_map(|devices| {
            let kept = Source::kept_on_device(data.clone(), devices, Resident::On).unwrap();
            assert!(
                kept.bytes_on_device()
                    .is_some_and(|bytes| bytes > ROWS as usize * data.spec().inputs.bytes())
            );
            [Source::new(data.clone(), devices), kept]
        });
        for (number, source) in sources.enumerate() {
            let sizes = [
                (1, None),
                (1, Some(3)),
                (2, Some(4)),
                (3, None),
                (4, Some(1)),
                (4, None),
            ];
            for (size, micro) in ddp_testing::cases_of(&format!("sizes {number}"), sizes, 3) {
                for rank in 0..size {
                    let mut expected = Loader::new(
                        Source::new(data.clone(), [Device::Cpu; 2]),
                        sampler,
                        rank,
                        size,
                        micro,
                    )
                    .unwrap();
                    let mut loader =
                        Loader::new(source.clone(), sampler, rank, size, micro).unwrap();
                    // Three epochs, and back.
                    for step in (0..18).chain([3, 17, 5]) {
                        let batch = loader.load(step).unwrap();
                        let got = contents(batch);
                        let what = format!("step {step}, rank {rank} of {size}, {source:?}");
                        assert!(
                            got == contents(expected.load(step).unwrap()),
                            "{what}: {got:?}"
                        );
                        assert_eq!(loader.rows(), expected.rows(), "{what}");
                    }
                }
            }
            let mut expected =
                InOrder::new(Source::new(data.clone(), [Device::Cpu; 2]), 1, 2, 6).unwrap();
            let mut batches = InOrder::new(source, 1, 2, 6).unwrap();
            assert_eq!(batches.count(), expected.count());
            for index in 0..batches.count() {
                assert!(
                    contents(batches.load(index).unwrap())
                        == contents(expected.load(index).unwrap()),
                    "{index}"
                );
            }
        }
    }
}

/// This training, with its rows kept on the GPU.
fn resident(setup: &Setup, device: Device, graph: GraphChoice) -> Training {
    let sampler = Sampler::new(setup.data.rows(), setup.batch, 7, false).unwrap();
    let training = setup.start(device, graph).unwrap();
    let source = Source::kept_on_device(setup.data.clone(), [device; 2], Resident::Auto).unwrap();
    assert!(source.bytes_on_device().is_some(), "it fits");
    Training {
        loader: Loader::new(source, sampler, 0, 1, setup.micro).unwrap(),
        ..training
    }
}

#[test]
fn training_on_resident_data_has_the_same_bits_eager_and_captured() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup {
        micro: Some(5),
        dropout: 0.25,
        ..Setup::new("glyphs,rows=50,held-out=0")
    };
    for graph in [GraphChoice::Off, GraphChoice::On] {
        let mut ferried = setup.start(gpu.device, graph).unwrap();
        let mut resident = resident(&setup, gpu.device, graph);
        for training in [&mut ferried, &mut resident] {
            (0..12).for_each(|step0| training.take(step0, 0.01, false).unwrap());
        }
        assert!(
            ferried.bits().unwrap() == resident.bits().unwrap(),
            "{graph:?}"
        );
        // The rows of a step gone by, as for saying which of them made a loss that is not a number.
        let losses = [&mut ferried, &mut resident].map(|training| {
            let losses = training
                .step
                .losses_of(training.loader.load(3).unwrap())
                .unwrap();
            (training.loader.rows().to_vec(), losses)
        });
        assert!(
            losses[0] == losses[1] && losses[0].1.len() == 2,
            "{losses:?}"
        );
        assert_eq!(
            resident.step.graphs().is_some_and(|graphs| graphs > 0),
            graph == GraphChoice::On
        );
    }
}

#[test]
fn a_resident_training_makes_no_tensor_once_it_is_warm() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup {
        micro: Some(5),
        ..Setup::new("glyphs,rows=50,held-out=0")
    };
    let mut training = resident(&setup, gpu.device, GraphChoice::On);
    (0..16).for_each(|step0| training.take(step0, 0.01, false).unwrap());
    // Other tests of this process count too: the least of several windows.
    let mut least = [u64::MAX; 3];
    for window in 0..6 {
        let counts = || {
            [
                memory::stats(gpu.device),
                memory::stats(Device::Cpu),
                memory::pinned_stats(),
            ]
            .map(|s| s.allocation_count)
        };
        let before = counts();
        (0..10).for_each(|step0| {
            training
                .take(16 + 10 * window + step0, 0.01, false)
                .unwrap()
        });
        for ((least, after), before) in least.iter_mut().zip(counts()).zip(before) {
            *least = (*least).min(after - before);
        }
    }
    assert_eq!(
        least, [0; 3],
        "on the GPU, in host memory, in pinned memory"
    );
}

#[test]
fn the_data_cross_once_and_then_row_numbers_alone() {
    let Some(gpu) = gpu() else { return };
    for (devices, classes) in places(&gpu)
        .into_iter()
        .flat_map(|devices| [(devices, true), (devices, false)])
    {
        let (data, ledger) = (data(40, 6, classes), Ledger::new());
        let sampler = Sampler::new(40, 8, 3, false).unwrap();
        with_ledger(&ledger, || {
            let source = Source::kept_on_device(data, devices, Resident::On).unwrap();
            let mut loader = Loader::new(source, sampler, 0, 1, None).unwrap();
            (0..7).for_each(|step| drop(loader.load(step).unwrap().clone()));
        });
        let mut crossed = BTreeMap::new();
        for row in ledger.rows() {
            assert_eq!(row.kind, TransferKind::Upload, "{row:?}");
            *crossed
                .entry(row.announced.expect("each is announced"))
                .or_insert(0) += row.bytes;
        }
        let data_bytes = 40 * (6 * 4 + if classes { 8 } else { 3 * 4 });
        let lanes = if devices[0] == devices[1] { 1 } else { 2 };
        let expected = [
            ("the row numbers of this step", lanes * 7 * 8 * 8),
            ("the training data, kept on the device", data_bytes),
        ];
        assert_eq!(crossed, BTreeMap::from(expected), "{devices:?}");
    }
}

#[test]
fn data_are_kept_where_they_leave_as_much_room_as_they_take() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    // 4 MiB, and classes.
    let data = data(1024, 1024, true);
    let needed = 1024 * (1024 * 4 + 8);
    let kept = |choice| Source::kept_on_device(data.clone(), [device; 2], choice);
    // So that the device is in use.
    let first = kept(Resident::On).unwrap();
    assert_eq!(first.bytes_on_device(), Some(needed));
    drop(first);
    let before = memory::stats(device).allocated_bytes;
    let with_free = |free: usize, body: &dyn Fn()| {
        memory::set_limit_bytes(device, Some(before + free));
        assert_eq!(memory::free_bytes(device), free);
        body();
        memory::set_limit_bytes(device, None);
    };
    with_free(4 * needed, &|| {
        assert!(kept(Resident::Auto).unwrap().bytes_on_device().is_some())
    });
    with_free(4 * needed - 1, &|| {
        assert!(kept(Resident::Auto).unwrap().bytes_on_device().is_none())
    });
    with_free(needed, &|| {
        assert!(kept(Resident::On).unwrap().bytes_on_device().is_some())
    });
    with_free(4 * needed, &|| {
        assert!(kept(Resident::Off).unwrap().bytes_on_device().is_none())
    });
    with_free(needed - 1, &|| {
        let made = memory::stats(device).allocation_count;
        let error = kept(Resident::On).unwrap_err();
        let told = error.to_string();
        assert_eq!(error.exit_code(), 71);
        for part in [
            "out of memory on cuda:0: ",
            "`data-on-device` auto and off train without",
            "4.0 MiB",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert_eq!(
            memory::stats(device).allocation_count,
            made,
            "nothing was tried"
        );
    });
    // Unused memory is returned.
    assert_eq!(memory::stats(device).allocated_bytes, before);
}

#[test]
fn host_memory_and_data_without_rows_keep_nothing() {
    let source = Source::kept_on_device(data(10, 4, true), [Device::Cpu; 2], Resident::On).unwrap();
    assert_eq!(source.bytes_on_device(), None);
    let mut loader =
        Loader::new(source, Sampler::new(10, 4, 0, false).unwrap(), 0, 1, None).unwrap();
    assert_eq!(loader.load(0).unwrap().x.device(), Device::Cpu);
    let Some(gpu) = gpu() else { return };
    let nothing = Source::kept_on_device(data(0, 4, true), [gpu.device; 2], Resident::On).unwrap();
    assert_eq!(nothing.bytes_on_device(), None);
    assert_eq!(InOrder::new(nothing, 0, 1, 10).unwrap().count(), 0);
}

// ---- what waits for what ------------------------------------------------------------------------

/// Rows that are large enough for the data to come up in three stages of at most 8 MiB: 3 MiB each.
fn large() -> Arc<dyn Dataset> {
    data(5, (3 << 20) / 4, false)
}

/// Batches are read by the compute streams alone while the loader runs ahead; the host looks once,
/// at the end. A step's work is to copy its batch aside, twice.
fn read_on_the_device(source: &Source, rows: u64, batch: u64, steps: u64) {
    let sampler = Sampler::new(rows, batch, 3, false).unwrap();
    let mut loader = Loader::new(source.clone(), sampler, 0, 1, None).unwrap();
    let mut expected = Vec::new();
    let mut seen: Vec<[Tensor; 2]> = Vec::new();
    for step in 0..steps {
        let batch = loader.load(step).unwrap().clone();
        let aside = || [&batch.x, &batch.targets].map(|part| part.empty_like().unwrap());
        for copy in [aside(), aside()] {
            copy[0].copy_from(&batch.x).unwrap();
            copy[1].copy_from(&batch.targets).unwrap();
            seen.push(copy);
        }
        expected.push(loader.rows().to_vec());
    }
    finish();
    for (copies, rows) in seen.chunks(2).zip(&expected) {
        for [x, targets] in copies {
            assert_rows(x, targets, rows);
        }
    }
}

/// These are the rows of `data` called `rows`.
fn assert_rows(x: &Tensor, targets: &Tensor, rows: &[u64]) {
    let width = x.count() / rows.len();
    let dataset = data(1 << 20, width, targets.dtype() == DType::I64);
    let expected = read_rows(&*dataset, rows).unwrap();
    for (got, expected) in [x, targets].into_iter().zip(&expected) {
        assert!(bits(got) == bits(expected), "{got} of rows {rows:?}");
    }
}

/// The bits of elements of any dtype.
fn bits(tensor: &Tensor) -> Vec<u64> {
    match tensor.dtype() {
        DType::I64 => {
            let numbers = tensor.to_vec::<i64>().unwrap();
            numbers.into_iter().map(i64::cast_unsigned).collect()
        }
        DType::I32 => {
            let numbers = tensor.to_vec::<i32>().unwrap();
            numbers
                .into_iter()
                .map(|x| x.cast_unsigned().into())
                .collect()
        }
        _ => {
            let numbers = tensor.to_vec::<f32>().unwrap();
            numbers.into_iter().map(|x| x.to_bits().into()).collect()
        }
    }
}

/// Lets everything that was given to the devices happen, so that what is wrong with it shows.
fn finish() {
    for device in Device::usable() {
        stream::synchronize(device).unwrap();
    }
}

const ONE: [Device; 2] = [Device::Cuda(0); 2];
const TWO: [Device; 2] = [Device::Cuda(0), Device::Cuda(1)];

fn small() -> Arc<dyn Dataset> {
    data(23, 100, true)
}

fn kept(data: Arc<dyn Dataset>, devices: [Device; 2]) -> Source {
    Source::kept_on_device(data, devices, Resident::On).unwrap()
}

/// Each way to one device and to two.
const SCENES: [(&str, usize, fn()); 5] = [
    ("out of host memory", 1, || {
        read_on_the_device(&Source::new(small(), ONE), 23, 8, 9)
    }),
    ("out of host memory to two devices", 2, || {
        read_on_the_device(&Source::new(small(), TWO), 23, 8, 9)
    }),
    ("out of the data there", 1, || {
        read_on_the_device(&kept(small(), ONE), 23, 8, 9)
    }),
    ("out of the data on two devices", 2, || {
        read_on_the_device(&kept(small(), TWO), 23, 8, 9)
    }),
    ("out of data that come up in stages", 1, || {
        read_on_the_device(&kept(large(), ONE), 5, 1, 1)
    }),
];

/// Run by the tests below in a separate process.
#[test]
#[ignore = "a part of every_wait_of_the_loader_is_needed"]
fn scenario() {
    quietly();
    let chosen: usize = std::env::var("DDP_TEST_SCENE").unwrap().parse().unwrap();
    SCENES[chosen].2();
    finish();
}

/// Steps are queued without waiting: for which of them did the loader wait?
fn stay_ahead(source: &Source, devices: [Device; 2]) {
    let sampler = Sampler::new(23, 8, 3, false).unwrap();
    let mut loader = Loader::new(source.clone(), sampler, 0, 1, None).unwrap();
    let mut steps: Vec<[Event; 2]> = Vec::new();
    let are_done = |step: &[Event; 2]| step.each_ref().map(Event::is_done);
    for step in 0..9 {
        let batch = loader.load(step).unwrap();
        // Steps 0 and 1 go before the copy stream's first use of the slots' memory, once.
        for (step, young) in steps.iter().enumerate().skip(2).rev().take(3) {
            assert_eq!(are_done(young), [false; 2], "step {step}");
        }
        for part in [&batch.x, &batch.targets] {
            part.empty_like().unwrap().copy_from(part).unwrap();
        }
        steps.push(devices.map(|device| Stream::current(device).unwrap().record().unwrap()));
    }
    // The last waits for the copy of batch 9, and that for step 7, which read the same slot. Step 8
    // is still pending.
    (9..12).for_each(|step| drop(loader.load(step).unwrap().clone()));
    assert_eq!(
        steps[7..].iter().map(are_done).collect::<Vec<_>>(),
        [[true; 2], [false; 2]]
    );
}

/// Run by the test below in a separate process.
#[test]
#[ignore = "a part of the_host_waits_for_no_young_step_and_a_copy_runs_beside_the_step_before"]
fn ahead() {
    quietly();
    let devices = if std::env::var("DDP_TEST_SCENE").unwrap() == "1" {
        ONE
    } else {
        TWO
    };
    stay_ahead(&Source::new(small(), devices), devices);
    stay_ahead(&kept(small(), devices), devices);
    finish();
}

#[test]
fn the_host_waits_for_no_young_step_and_a_copy_runs_beside_the_step_before() {
    let Some(gpu) = simulated_gpu_of(1) else {
        return;
    };
    for devices in 1..=places(&gpu).len() {
        // Only what is waited for runs.
        let (passed, text) = play("ahead", devices, &[("SIMCUDA_SCHEDULE", "lazy")]);
        assert!(passed, "{devices}: {text}");
    }
}

/// How a scene ends with these variables.
fn play(program: &str, scene: usize, variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let program = format!("loader::{program}");
    command.args([
        "--exact",
        &program,
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
        .env("DDP_TEST_SCENE", scene.to_string())
        .envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// The scenes that this machine has devices for.
fn scenes() -> Vec<(usize, &'static str)> {
    let devices = Device::usable().len() - 1;
    let scenes = SCENES
        .iter()
        .enumerate()
        .filter(|(_, scene)| scene.1 <= devices);
    scenes.map(|(index, scene)| (index, scene.0)).collect()
}

/// What every way of a batch onto a GPU calls, as `loader/devices.rs` lists it.
const STEPS: [&str; 4] = ["leave", "wait_for_host_side", "free_slot", "hand_over"];

/// The place in the loader that waits, from a call stack: what waits, and for which way. None for
/// other waits, such as those for the first use of memory on a stream.
fn place_of(stack: &str) -> Option<String> {
    if stack.contains("kernels/src/memory/") {
        return None;
    }
    let own: Vec<String> = stack
        .split(" < ")
        .filter_map(|frame| {
            let (function, line) = frame.split_once(" at ")?;
            let file = line
                .split_once("ddp/data/src/loader/")?
                .1
                .split(':')
                .next()?;
            // Of `path::to::fill::{{closure}}::h0123`, `fill<…>` and `{closure#0}` only the
            // function.
            let function = function.split("::{").next()?.split('<').next()?;
            let is_hash = |name: &str| name.len() == 17 && name.starts_with('h');
            let name = function.rsplit("::").find(|name| !is_hash(name))?;
            (!name.starts_with('{')).then(|| format!("{name} at {file}"))
        })
        .collect();
    let is_step = |frame: &String| STEPS.iter().any(|step| frame.starts_with(step));
    let way = own.iter().find(|frame| !is_step(frame))?;
    Some(match own.first() {
        Some(first) if first != way => format!("{first}, for {way}"),
        _ => way.clone(),
    })
}

/// The waits of a scene: number and place.
fn waits_of(scene: usize, file: &std::path::Path) -> Vec<(String, String)> {
    let (passed, text) = play(
        "scenario",
        scene,
        &[
            ("SIMCUDA_COUNT_WAITS", file.to_str().unwrap()),
            ("SIMCUDA_SCHEDULE", "lazy"),
        ],
    );
    assert!(passed, "{}, with every wait: {text}", SCENES[scene].0);
    let waits = std::fs::read_to_string(file).unwrap();
    let parts = |line: &str| {
        let (number, rest) = line.split_once(' ')?;
        Some((number.to_string(), place_of(rest.split_once(' ')?.1)?))
    };
    waits.lines().filter_map(parts).collect()
}

#[test]
fn every_wait_of_the_loader_is_needed() {
    let Some(_gpu) = simulated_gpu_of(1) else {
        return;
    };
    let file = std::env::temp_dir().join(format!("loader-waits-{}", std::process::id()));
    // By scene and place: how often it waited, and how often a missing wait was noticed.
    let mut places: BTreeMap<(&str, String), [usize; 2]> = BTreeMap::new();
    // Every place that waits, and in some of them, what happens without each of its waits.
    let mut numbers: BTreeMap<(&str, String), (usize, Vec<String>)> = BTreeMap::new();
    for (scene, name) in scenes() {
        for (number, place) in waits_of(scene, &file) {
            let (_, of_place) = numbers.entry((name, place)).or_insert((scene, Vec::new()));
            of_place.push(number);
        }
    }
    let all: Vec<(&str, String)> = numbers.keys().cloned().collect();
    for place in ddp_testing::cases_of("waits of the loader", all, 4) {
        let (scene, numbers) = &numbers[&place];
        let mut noticed = 0;
        // The later ones first: another wait can do the work of the first, as said at the end.
        for number in numbers.iter().rev() {
            if noticed > 0 && !ddp_testing::all_cases() {
                break;
            }
            let variables = [
                ("SIMCUDA_IGNORE_WAIT", number.as_str()),
                ("SIMCUDA_SCHEDULE", "lazy"),
            ];
            noticed += usize::from(!play("scenario", *scene, &variables).0);
        }
        places.insert(place, [numbers.len(), noticed]);
    }
    // The file is no longer needed, and a failure to remove it does no harm.
    let _ = std::fs::remove_file(&file);
    let table: Vec<String> = places
        .iter()
        .map(|((scene, place), seen)| format!("{scene}: {place}: {seen:?}"))
        .collect();
    let table = table.join("\n");
    println!("{table}");
    // Not every wait: the first one for a slot follows the copy stream's first use of the other
    // slot's memory, which waits for all earlier work of the compute stream.
    assert!(
        places.values().all(|[_, noticed]| *noticed > 0),
        "removed, and no check failed:\n{table}"
    );
    for (scene, name) in scenes() {
        let waits = |what: &str| {
            numbers
                .keys()
                .any(|(in_scene, place)| *in_scene == name && place.contains(what))
        };
        let expected: &[&str] = match scene {
            4 => &["upload"],
            _ => &["wait_for_host_side", "free_slot", "hand_over"],
        };
        assert!(
            expected.iter().all(|what| waits(what)),
            "{name} waits for less than {expected:?}:\n{table}"
        );
    }
}

#[test]
fn nothing_races_in_any_order() {
    let Some(_gpu) = gpu() else { return };
    // Real GPUs have an order of their own.
    let seeds = if is_simulated() { 20 } else { 1 };
    let orders = (0..seeds)
        .map(|seed| ("SIMCUDA_SEED", seed.to_string()))
        .chain(["lazy", "eager"].map(|schedule| ("SIMCUDA_SCHEDULE", schedule.into())));
    let cases = scenes()
        .into_iter()
        .flat_map(|scene| orders.clone().map(move |order| (scene, order)));
    for ((scene, name), (variable, value)) in
        ddp_testing::cases_of("orders of the loader", cases, 6)
    {
        let (passed, text) = play("scenario", scene, &[(variable, &value)]);
        assert!(
            passed && !text.contains("simcuda:"),
            "{name}, {variable}={value}: {text}"
        );
    }
}
