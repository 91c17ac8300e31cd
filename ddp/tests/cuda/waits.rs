//! Every wait of the reducer, the step, the loader and the GPU groups is needed, as
//! `tests/waits.rs` shows for `kernels/`. Jobs are repeated, and in each run one wait of rank 0 has
//! no effect. That must be noticed: by a finding, an error, another model or another number in the
//! metrics log. A place in the source where no missing wait is noticed must be in the list of
//! redundant ones, with the reason.
//!
//! Waits inside `kernels/` (a stream's first use of memory, a copy that is complete when it
//! returns) count for the place that called them: a caller may not rely on what happens to be
//! waited for.
//!
//! Each place waits in every step. Its waits are tried from the middle of a job on, until one is
//! noticed. A few of the places are tried; the others are searched; with `DDP_CASES=all` the table
//! that is printed counts every wait.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use ddp_comm::Reduce;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::orders::{STEPS, Way, machine_of, side_by_side};
use crate::support::job::Folder;
use crate::support::metrics_log::model_bytes;
use crate::support::test_name;
use crate::support::training::on_ranks;

/// What may be left out, and why: a part of a place, or of the line there.
const REDUNDANT: [(&str, &str); 7] = [
    (
        "graph.launch()",
        "a graph comes after what the streams that took part in it were given, and before what they will be. The reducer's stream waits for the \
         compute stream by itself before it does anything, and is joined before the step ends. Others build on it (tests/waits.rs)",
    ),
    (
        "wait < stream < start < begin, captured",
        "gathers are the first of a captured step: in its graph there is nothing before them, and the graph as a whole comes after the step before. \
         It is how the reducer's stream comes to take part in the capture",
    ),
    (
        ", visit <",
        "a stream's first use of some memory comes after what made it (kernels/, where tests/waits.rs shows that it is needed). It happens once; \
         where the reducer or the loader already orders the streams it adds nothing",
    ),
    (
        "Ok(event.synchronize()?)",
        "the device has said that it is done; this brings its error if it failed, and an end to the asking",
    ),
    (
        "Tensor::from_slice(",
        "an upload is over when it returns. From memory that is not pinned the call has read it by then anyway, as far as the simulator knows \
         (kernels/, where tests/waits.rs shows that it is needed for pinned memory)",
    ),
    (
        "stage.bad_step.copy_from(",
        "a copy between devices puts both in order (kernels/). The one of the scale, just before, has done that, and nothing comes between",
    ),
    (
        "< copy_masters",
        "the snapshot copies the optimizer's moments next, on the same stream, and waits for each. An optimizer without moments, which none of these \
         jobs has, needs it",
    ),
];

/// What has all that waits.
const OF_TWO_GPUS: [Case; 5] = [
    training(2, 2, "--graph off --data-on-device on --zero 1"),
    training(2, 2, "--graph off --data-on-device off"),
    training(2, 2, "--graph on --data-on-device on --zero 1"),
    training(1, 2, "--devices-per-rank 2 --data-on-device off"),
    Case::Streams,
];
const OF_FOUR_GPUS: [Case; 2] = [
    training(2, 4, "--devices-per-rank 2 --data-on-device off --zero 1"),
    Case::Streams,
];

const fn training(ranks: usize, gpus: usize, flags: &'static str) -> Case {
    Case::Training(Way { ranks, gpus, flags })
}

/// Where waits are asked about.
const ROOMS: [&str; 4] = [
    "src/reducer",
    "src/step",
    "/loader",
    "comm/src/transport/nccl",
];

/// The result of a job.
#[derive(PartialEq)]
struct Outcome {
    model: Vec<u8>,
    /// What the metrics log says of its steps and evaluations.
    numbers: Vec<String>,
}

/// What is run again and again.
enum Case {
    Training(Way),
    /// Ranks as threads that use their group on several streams, unlike a training:
    /// `groups_on_several_streams`.
    Streams,
}

impl Case {
    fn name(&self) -> &'static str {
        match self {
            Case::Training(way) => way.flags,
            Case::Streams => "groups on several streams",
        }
    }

    /// Runs it with `variables` for rank 0. Returns its result, or how it ended.
    fn run(&self, folder: &Folder, variables: &str) -> Result<Outcome, String> {
        match self {
            Case::Training(way) => {
                // Nothing runs before it has to: what is read too early is not there.
                let ended = way
                    .job(folder, variables)
                    .env("SIMCUDA_SCHEDULE", "lazy")
                    .run();
                if ended.exit_code() != Some(0) {
                    return Err(ended.to_string());
                }
                let log = folder.metrics_log();
                let events = log.all("step").into_iter().chain(log.all("eval"));
                let numbers = events.map(|event| {
                    ["loss", "accuracy", "grad_norm"]
                        .map(|name| event[name].to_string())
                        .concat()
                });
                Ok(Outcome {
                    model: model_bytes(&folder.out(), STEPS),
                    numbers: numbers.collect(),
                })
            }
            Case::Streams => {
                let mut command =
                    Command::new(std::env::current_exe().expect("this program has a path"));
                command.args([
                    "--exact",
                    "waits::groups_on_several_streams",
                    "--include-ignored",
                    "--test-threads=1",
                ]);
                command
                    .envs(variables.split_once('='))
                    .env("SIMCUDA_SCHEDULE", "lazy")
                    .env("SIMCUDA_DEVICES", "2");
                let output = command.output().expect("this program can be started again");
                if output.status.success() {
                    Ok(Outcome {
                        model: Vec::new(),
                        numbers: Vec::new(),
                    })
                } else {
                    Err(String::from_utf8_lossy(&output.stderr).into_owned())
                }
            }
        }
    }
}

/// Run by the tests below in a separate process. The threads submit work to their devices in
/// turn, so that waits have the same numbers in every run.
#[test]
#[ignore = "a part of every_wait_of_ranks_with_a_gpu_each_is_needed"]
fn groups_on_several_streams() {
    const COUNT: usize = 3000;
    on_ranks(2, None, |world| {
        let device = Device::Cuda(world.rank());
        let group = world.gpu_group("gradients", device)?;
        let streams = [Stream::new(device)?, Stream::new(device)?];
        let mut reduced: Vec<Tensor> = Vec::new();
        world.barrier()?;
        for turn in 0..world.size() {
            // The second time the streams know the group's own memory already.
            for _ in 0..2 {
                for stream in streams.iter().filter(|_| turn == world.rank()) {
                    // Made on the device's default stream, for which no event is waited.
                    let ones = Tensor::full(&[COUNT], 1.0, DType::F32, device)?.named("ones");
                    group.all_reduce(&ones, Reduce::Sum, stream)?;
                    reduced.push(ones);
                }
            }
            world.barrier()?;
        }
        for turn in 0..world.size() {
            for (ones, stream) in reduced
                .iter()
                .zip(streams.iter().cycle())
                .filter(|_| turn == world.rank())
            {
                assert_eq!(stream.scope(|| ones.to_vec::<f32>())?, [2.0; COUNT]);
            }
            world.barrier()?;
        }
        Ok(())
    });
}

/// A wait: its number in the job, and its place.
struct Wait {
    number: usize,
    place: String,
}

/// The place of a call stack: where in `ROOMS` the wait was requested, which function of `kernels/`
/// it is, and the path within the room. None for waits of other rooms.
fn place_of(stack: &str) -> Option<String> {
    let frames: Vec<&str> = stack.split(" < ").collect();
    let is_asked = |frame: &&str| frame.contains(" at ddp/") || frame.contains(" at comm/src/");
    let asked = frames.iter().position(is_asked)?;
    let room = ROOMS.iter().find(|room| frames[asked].contains(*room))?;
    let wrappers = ["kernels/src/cuda/queue.rs", "kernels/src/cuda/calls.rs"];
    let is_wrapper = |frame: &str| {
        parts(frame).0 == "{closure}" || wrappers.iter().any(|file| frame.contains(file))
    };
    let of_kernels = |frame: &&&str| frame.contains(" at kernels/src/") && !is_wrapper(frame);
    let kind = frames[..asked]
        .iter()
        .find(of_kernels)
        .map_or("", |frame| parts(frame).0);
    let line = parts(frames[asked]).1;
    let mut place = format!("{line} `{}`, {kind}", source_at(line));
    for frame in frames[asked..]
        .iter()
        .take_while(|frame| frame.contains(*room))
    {
        place += &format!(" < {}", parts(frame).0);
    }
    let is_captured = frames
        .iter()
        .any(|frame| frame.starts_with("capture at kernels/src/graph.rs"));
    Some(if is_captured {
        format!("{place}, captured")
    } else {
        place
    })
}

/// Function and FILE:LINE of a frame; of a closure, without the function that it is in.
fn parts(frame: &str) -> (&str, &str) {
    let frame = frame.rsplit("::").next().unwrap_or(frame);
    frame.split_once(" at ").unwrap_or((frame, ""))
}

/// The text of a source line given as FILE:LINE: it says more than a number, and survives
/// insertions above it.
fn source_at(place: &str) -> String {
    let Some((file, line)) = place.rsplit_once(':') else {
        return String::new();
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let index = line.parse::<usize>().expect("a line is a number");
    text.lines()
        .nth(index - 1)
        .unwrap_or_default()
        .trim()
        .to_string()
}

/// The waits of rank 0 in question, in order, and the result of the job.
fn waits_of(case: &Case) -> (Vec<Wait>, Outcome) {
    let folder = Folder::new("list");
    let list = folder.path().join("waits");
    let outcome = case.run(&folder, &format!("SIMCUDA_COUNT_WAITS={}", list.display()));
    let outcome =
        outcome.unwrap_or_else(|ended| panic!("{}, with every wait: {ended}", case.name()));
    let text = std::fs::read_to_string(&list).expect("the simulator has listed the waits");
    let has_lines = text.contains(" at kernels/src/");
    assert!(
        has_lines,
        "built without line tables, so places cannot be told apart: leave `debug` of the profile as it is"
    );
    let wait = |line: &str| {
        let (number, rest) = line.split_once(' ')?;
        Some(Wait {
            number: number.parse().ok()?,
            place: place_of(rest.split_once(' ')?.1)?,
        })
    };
    (text.lines().filter_map(wait).collect(), outcome)
}

/// The places at which waits are left out, unless `DDP_CASES` asks for all.
const PLACES: usize = 3;

/// A place that waits: how often it did, how often a wait was left out, and how often that was
/// noticed.
#[derive(Default)]
struct Seen {
    waits: usize,
    tried: usize,
    noticed: usize,
}

fn argued(place: &str) -> bool {
    REDUNDANT.iter().any(|(known, _)| place.contains(known))
}

/// Leaves out one wait of a place after the other, from the middle of the job on.
fn try_without(case: &Case, outcome: &Outcome, numbers: &[usize], seen: &mut Seen) {
    let all = ddp_testing::all_cases();
    let (before, after) = numbers.split_at(numbers.len() / 2);
    for number in after.iter().chain(before) {
        let without = case.run(
            &Folder::new("waits"),
            &format!("SIMCUDA_IGNORE_WAIT={number}"),
        );
        let noticed = !without.is_ok_and(|without| without == *outcome);
        seen.tried += 1;
        seen.noticed += usize::from(noticed);
        if noticed && !all {
            return;
        }
    }
}

/// The numbers of the waits of each place.
type Waits = BTreeMap<String, Vec<usize>>;

/// All places of these jobs that wait; in some of them waits are left out.
fn places_of(cases: &[Case]) -> BTreeMap<String, Seen> {
    let mut places: BTreeMap<String, Seen> = BTreeMap::new();
    let mut jobs: Vec<(&Case, Outcome, Waits)> = Vec::new();
    for case in cases {
        let (waits, outcome) = waits_of(case);
        let mut by_place = Waits::new();
        for wait in waits {
            places.entry(wait.place.clone()).or_default().waits += 1;
            by_place.entry(wait.place).or_default().push(wait.number);
        }
        jobs.push((case, outcome, by_place));
    }
    let chosen = ddp_testing::cases_of(&test_name(), places.keys().cloned(), PLACES);
    let places = Mutex::new(places);
    side_by_side(&chosen, |place| {
        let mut seen = Seen::default();
        for (case, outcome, by_place) in &jobs {
            let Some(numbers) = by_place.get(place) else {
                continue;
            };
            // The small one is always played through: it shows what trainings do not.
            let is_settled = seen.noticed > 0 || argued(place);
            if ddp_testing::all_cases() || matches!(case, Case::Streams) || !is_settled {
                try_without(case, outcome, numbers, &mut seen);
            }
        }
        let mut places = places.lock().expect("nothing panics under this lock");
        let waits = places[place].waits;
        places.insert(place.clone(), Seen { waits, ..seen });
    });
    places.into_inner().expect("nothing panics under this lock")
}

fn table(places: &BTreeMap<String, Seen>) -> String {
    let row = |(place, seen): (&String, &Seen)| {
        format!(
            "{place}: {} of {} noticed, of {}",
            seen.noticed, seen.tried, seen.waits
        )
    };
    places.iter().map(row).collect::<Vec<String>>().join("\n")
}

/// Removing any wait must be noticed.
#[track_caller]
fn assert_all_are_needed(places: &BTreeMap<String, Seen>) {
    let table = table(places);
    println!("{table}");
    let is_unnoticed =
        |(place, seen): &(&String, &Seen)| seen.tried > 0 && seen.noticed == 0 && !argued(place);
    let unnoticed: Vec<&String> = places
        .iter()
        .filter(is_unnoticed)
        .map(|(place, _)| place)
        .collect();
    assert!(
        unnoticed.is_empty(),
        "removed, and no check failed: {unnoticed:#?}\n{table}"
    );
    assert!(places.len() >= 15, "{table}");
}

#[test]
fn every_wait_of_ranks_with_a_gpu_each_is_needed() {
    let Some(_gpu) = machine_of(2) else { return };
    let places = places_of(&OF_TWO_GPUS);
    assert_all_are_needed(&places);
    for (known, _) in REDUNDANT {
        assert!(
            places.keys().any(|place| place.contains(known)),
            "{known} waits no more:\n{}",
            table(&places)
        );
    }
}

/// The same places as above, in another setting.
#[test]
#[ignore = "launch/search runs it"]
fn every_wait_of_ranks_with_two_gpus_each_is_needed() {
    let Some(_gpu) = machine_of(4) else { return };
    assert_all_are_needed(&places_of(&OF_FOUR_GPUS));
}
