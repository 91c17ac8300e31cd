//! How fast the math is on this machine, as a share of what the machine can do.
//!
//! `cargo bench -p ddp-kernels --bench ops [-- FILTER] [--threads N] [--json]`
//!
//! First the machine: multiply-adds a second on all threads, and the bandwidth of a copy larger
//! than the caches. Then each operation: matmuls against the multiply-adds, the rest as bytes read
//! and written a second against the copy. Threads are pinned, figures are medians. Inputs are
//! random, never zeros.

mod attention;
mod machine;
mod matmuls;
mod memory_bound;

use std::time::Instant;

use ddp_kernels::{Result, threads};

/// What a run of the bench was asked to do.
struct Options {
    filter: String,
    threads: usize,
    json: bool,
}

fn options() -> std::result::Result<Options, String> {
    let mut options = Options {
        filter: String::new(),
        threads: threads::count(),
        json: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo adds this.
            "--bench" => {}
            "--json" => options.json = true,
            "--threads" => {
                let count = arguments.next().and_then(|count| count.parse().ok());
                options.threads = count.ok_or("--threads needs a number")?;
            }
            other if other.starts_with('-') => return Err(format!("unknown option {other}")),
            other => options.filter = other.to_string(),
        }
    }
    Ok(options)
}

/// One line of the report.
struct Line {
    name: String,
    figure: f64,
    unit: &'static str,
    /// What the figure is compared with, and how much of it was reached.
    shares: Vec<(&'static str, f64)>,
}

impl Line {
    fn print(&self, json: bool) {
        if json {
            let shares: serde_json::Map<String, serde_json::Value> = self
                .shares
                .iter()
                .map(|(of, share)| ((*of).to_string(), (*share).into()))
                .collect();
            let line = serde_json::json!({ "name": self.name, "figure": self.figure, "unit": self.unit, "shares": shares });
            println!("{line}");
            return;
        }
        let shares: Vec<String> = self
            .shares
            .iter()
            .map(|(of, share)| format!("{:5.1}% of {of}", share * 100.0))
            .collect();
        println!(
            "{:<44}{:>9.1} {:<9} {}",
            self.name,
            self.figure,
            self.unit,
            shares.join("   ")
        );
    }
}

/// Rounds of one measurement: the median of these is quoted.
const ROUNDS: usize = 9;
/// How long a round lasts at least.
const ROUND_S: f64 = 0.02;

/// How often a body runs in a round.
fn repeats(body: &mut dyn FnMut()) -> usize {
    body();
    let start = Instant::now();
    body();
    let seconds = start.elapsed().as_secs_f64().max(1e-9);
    (ROUND_S / seconds).ceil().clamp(1.0, 1e6) as usize
}

/// Seconds a call, for each of several bodies taken in turn: `ROUNDS` figures each.
fn in_turn(bodies: &mut [&mut dyn FnMut()]) -> Vec<Vec<f64>> {
    let repeats: Vec<usize> = bodies.iter_mut().map(|body| repeats(body)).collect();
    let mut seconds = vec![Vec::with_capacity(ROUNDS); bodies.len()];
    for _ in 0..ROUNDS {
        for (index, body) in bodies.iter_mut().enumerate() {
            let start = Instant::now();
            for _ in 0..repeats[index] {
                body();
            }
            seconds[index].push(start.elapsed().as_secs_f64() / repeats[index] as f64);
        }
    }
    seconds
}

/// Measures a body that multiplies and adds. Its rate is compared with the machine's multiply-adds
/// at their best, and with those right after it: some processors slow down while they run many wide
/// instructions.
fn against_multiply_adds(
    name: String,
    operations: usize,
    machine: &machine::Machine,
    body: &mut dyn FnMut(),
) -> Line {
    let repeats = repeats(body);
    let round = |_| {
        let start = Instant::now();
        (0..repeats).for_each(|_| body());
        let seconds = start.elapsed().as_secs_f64() / repeats as f64;
        (seconds, machine::multiply_adds_burst(machine.threads))
    };
    let (seconds, after): (Vec<f64>, Vec<f64>) = (0..ROUNDS).map(round).unzip();
    let gflops = operations as f64 / median(seconds) / 1e9;
    Line {
        name,
        figure: gflops,
        unit: "GFLOP/s",
        shares: vec![
            ("the multiply-adds", gflops / machine.gflops),
            ("those right after it", gflops / median(after)),
        ],
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median of the ratios, round by round: what drifts with the machine cancels.
fn median_ratio(above: &[f64], below: &[f64]) -> f64 {
    median(
        above
            .iter()
            .zip(below)
            .map(|(above, below)| above / below)
            .collect(),
    )
}

fn run(options: &Options) -> Result<()> {
    threads::set_count_pinned_from(0, options.threads)?;
    let machine = machine::measure(options.threads);
    let wanted = |name: &str| name.contains(&options.filter);
    let emit = |line: Line| line.print(options.json);
    emit(Line {
        name: format!("machine: multiply-adds, {} threads", options.threads),
        figure: machine.gflops,
        unit: "GFLOP/s",
        shares: vec![],
    });
    emit(Line {
        name: format!("machine: copy of {} MiB", machine::COPY_BYTES >> 20),
        figure: machine.copy_gb_s,
        unit: "GB/s",
        shares: vec![],
    });
    matmuls::run(&machine, &wanted, &emit)?;
    attention::run(&machine, &wanted, &emit)?;
    memory_bound::run(&machine, &wanted, &emit)
}

fn main() -> std::process::ExitCode {
    let outcome = options().and_then(|options| run(&options).map_err(|error| error.to_string()));
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            std::process::ExitCode::from(2)
        }
    }
}
