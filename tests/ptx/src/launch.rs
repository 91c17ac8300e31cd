//! Launches: the blocks of a grid one after the other, the warps of a block in turns between
//! barriers.

use crate::decode::{Owned, Program};
use crate::finding::{Fault, Finding, Kind};
use crate::memory::Overlay;
use crate::op::{Reduction, Register, Width};
use crate::products::Warpgroup;
use crate::shared::Shared;
use crate::state::{Ground, Site, Stop, Warp, bits_of};
use crate::wgmma;

/// Instructions that a warp may take in steps of 2²⁰: about a minute of one that does nothing else.
const STEPS_MAX: u64 = 1 << 13;

/// What is launched, besides the kernel.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory that the launch adds.
    pub dynamic_shared_bytes: u32,
    /// The values of the parameters, each as long as its type.
    pub arguments: Vec<Vec<u8>>,
    /// The order of blocks and warps.
    pub seed: u64,
    /// None: `ex2.approx` and other approximate functions are rounded once, as if they were exact.
    /// Else they err within the bounds of the ISA, by this seed.
    pub errors: Option<u64>,
}

/// How much was executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps.
    pub instructions: u64,
    /// Instructions of threads.
    pub thread_instructions: u64,
}

/// A small generator of numbers: an order from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound.max(1)
    }
}

/// The parameters as they lie in their space; None if the arguments do not fit.
fn parameters(program: &Program, arguments: &[Vec<u8>]) -> Option<Vec<u8>> {
    if arguments.len() != program.parameters.len() {
        return None;
    }
    let mut space = vec![0; program.parameter_bytes as usize];
    for (value, (start, bytes)) in arguments.iter().zip(&program.parameters) {
        if value.len() as u64 != *bytes {
            return None;
        }
        space[*start as usize..(*start + *bytes) as usize].copy_from_slice(value);
    }
    Some(space)
}

/// What went wrong, in words.
pub(crate) struct Teller<'a> {
    pub(crate) program: &'a Program,
    pub(crate) files: &'a [(u32, String)],
}

impl Teller<'_> {
    fn finding(&self, site: &Site, thread: u32, at: u32, fault: Fault) -> Finding {
        let coded = self.program.code.get(at as usize);
        let (file, line) = coded.map_or((0, 0), |coded| coded.source);
        let name = self.files.iter().find(|(number, _)| *number == file);
        let [x, y, _] = site.block;
        Finding {
            kind: fault.kind,
            kernel: self.program.name.clone(),
            line: coded.map_or(0, |coded| coded.line),
            source: name.map(|(_, name)| format!("{name}:{line}")),
            block: site.at,
            thread: [thread % x, thread / x % y, thread / x / y],
            message: fault.message,
        }
    }
}

/// Runs a launch on global memory.
pub(crate) fn run(
    teller: &Teller<'_>,
    launch: &Launch,
    global: &mut Overlay<'_>,
) -> Result<Counts, Finding> {
    let program = teller.program;
    let threads = launch
        .block
        .iter()
        .map(|size| u64::from(*size))
        .product::<u64>();
    let blocks = launch
        .grid
        .iter()
        .map(|size| u64::from(*size))
        .product::<u64>();
    let shared_bytes = program
        .shared
        .iter()
        .map(|owned| owned.bytes as u32)
        .sum::<u32>()
        + launch.dynamic_shared_bytes;
    let mut site = Site {
        grid: launch.grid,
        block: launch.block,
        at: [0; 3],
        dynamic_shared_bytes: launch.dynamic_shared_bytes,
        shared_bytes,
    };
    let refuse =
        |message: String| teller.finding(&site, 0, 0, Fault::new(Kind::Stopped, 0, message));
    if blocks == 0 || threads == 0 || threads > 1024 {
        return Err(refuse(format!(
            "a launch of {blocks} blocks of {threads} threads"
        )));
    }
    if let Some(most) = program
        .threads_max
        .filter(|most| threads > u64::from(*most))
    {
        return Err(refuse(format!(
            "blocks of {threads} threads, and .maxntid allows {most}"
        )));
    }
    let Some(parameters) = parameters(program, &launch.arguments) else {
        let given: Vec<usize> = launch.arguments.iter().map(Vec::len).collect();
        let needed: Vec<u64> = program.parameters.iter().map(|(_, bytes)| *bytes).collect();
        return Err(refuse(format!(
            "arguments of {given:?} bytes, and the kernel's parameters have {needed:?}"
        )));
    };
    let dynamic = Owned {
        name: "dynamic shared memory".to_owned(),
        start: program.dynamic_at,
        bytes: u64::from(launch.dynamic_shared_bytes),
    };
    let mut shared = Shared::new(
        program.shared.iter().cloned().chain([dynamic]).collect(),
        program.cell_bytes,
    );
    let mut warps: Vec<Warp> = (0..threads.div_ceil(32))
        .map(|_| Warp::new(program))
        .collect();
    let mut ground = Ground {
        program,
        shared: &mut shared,
        global,
        parameters: &parameters,
        barriers: 0,
        warpgroups: Vec::new(),
        errors: launch.errors,
        counts: [0; 2],
        left: STEPS_MAX,
    };
    let mut random = Random(launch.seed);
    // Blocks in an order that a seed chooses: all from some block on, forward or backward.
    let (first, is_backward) = (random.below(blocks), random.below(2) == 1);
    for number in 0..blocks {
        let number = (first + if is_backward { blocks - number } else { number }) % blocks;
        let (x, y) = (u64::from(launch.grid[0]), u64::from(launch.grid[1]));
        site.at = [
            (number % x) as u32,
            (number / x % y) as u32,
            (number / x / y) as u32,
        ];
        ground.shared.reset();
        ground.barriers += 1;
        ground.warpgroups = (0..threads / 128).map(|_| Warpgroup::default()).collect();
        for (at, warp) in warps.iter_mut().enumerate() {
            warp.start(program, &site, at as u32 * 32);
        }
        block(&mut warps, &mut ground, &mut random)
            .map_err(|(thread, at, fault)| teller.finding(&site, thread, at, fault))?;
    }
    Ok(Counts {
        instructions: ground.counts[0],
        thread_instructions: ground.counts[1],
    })
}

/// Where a warp waits.
#[derive(Clone, Copy)]
struct Waits {
    stop: Stop,
    id: u32,
    threads: Option<u32>,
    at: u32,
}

/// Runs the warps of a block to their end. An error has the thread and the instruction.
fn block(
    warps: &mut [Warp],
    ground: &mut Ground<'_, '_>,
    random: &mut Random,
) -> Result<(), (u32, u32, Fault)> {
    let mut waits: Vec<Option<Waits>> = vec![None; warps.len()];
    let mut has_exited = vec![false; warps.len()];
    // Threads that arrived by `bar.arrive`, which nobody waits with.
    let mut arrived = [0u32; 16];
    loop {
        let mut runs: Vec<usize> = (0..warps.len())
            .filter(|at| waits[*at].is_none() && !has_exited[*at])
            .collect();
        if runs.is_empty() {
            if has_exited.iter().all(|has| *has) {
                return wgmma::ended(ground);
            }
            release(warps, ground, &mut waits, &has_exited, &mut arrived)?;
            continue;
        }
        let first = random.below(runs.len() as u64) as usize;
        runs.rotate_left(first);
        for number in runs {
            let warp = &mut warps[number];
            match warp
                .run(ground)
                .map_err(|(at, fault)| (warp.first_thread + fault.lane, at, fault))?
            {
                Stop::Exited => has_exited[number] = true,
                stop @ Stop::Barrier {
                    id,
                    threads,
                    arrives_only,
                    at,
                    ..
                } => {
                    if id > 15 {
                        let fault =
                            Fault::new(Kind::Barrier, 0, format!("barrier {id}: there are 16"));
                        return Err((warp.first_thread, at, fault));
                    }
                    if arrives_only {
                        arrived[id as usize] += 32;
                        warp.pass_barrier();
                        ground.shared.is_followed = false;
                    } else {
                        waits[number] = Some(Waits {
                            stop,
                            id,
                            threads,
                            at,
                        });
                    }
                }
            }
        }
    }
}

/// Lets warps go on whose barrier is complete; an error if there is none.
fn release(
    warps: &mut [Warp],
    ground: &mut Ground<'_, '_>,
    waits: &mut [Option<Waits>],
    has_exited: &[bool],
    arrived: &mut [u32; 16],
) -> Result<(), (u32, u32, Fault)> {
    for id in 0..16 {
        let here: Vec<usize> = (0..warps.len())
            .filter(|at| waits[*at].is_some_and(|waits| waits.id == id))
            .collect();
        let Some(first) = here.first().and_then(|at| waits[*at]) else {
            continue;
        };
        let is_whole = here.len() == has_exited.iter().filter(|has| !**has).count();
        let count = here.len() as u32 * 32 + arrived[id as usize];
        let is_complete = match first.threads {
            None => is_whole,
            Some(threads) => count >= threads,
        };
        if !is_complete {
            continue;
        }
        arrived[id as usize] = 0;
        reduce(warps, &here, waits);
        if is_whole {
            ground.barriers += 1;
        } else {
            ground.shared.is_followed = false;
        }
        for at in here {
            warps[at].pass_barrier();
            waits[at] = None;
        }
        return Ok(());
    }
    let (number, waits) = waits
        .iter()
        .enumerate()
        .find_map(|(at, waits)| Some((at, (*waits)?)))
        .expect("a warp waits");
    let needs = waits
        .threads
        .map_or("all threads of the block".to_owned(), |threads| {
            format!("{threads} threads")
        });
    let message = format!(
        "barrier {} waits for {needs}, and no warp goes on",
        waits.id
    );
    Err((
        number as u32 * 32,
        waits.at,
        Fault::new(Kind::Barrier, 0, message),
    ))
}

/// `bar.red`: what all threads of the barrier say, for each of them.
fn reduce(warps: &mut [Warp], here: &[usize], waits: &[Option<Waits>]) {
    let reduction = |at: usize| match waits[at]?.stop {
        Stop::Barrier { reduce, .. } => reduce,
        Stop::Exited => None,
    };
    let (mut count, mut all) = (0, 0);
    for at in here {
        let Some(reduce) = reduction(*at) else { return };
        let lanes = warps[*at].at_barrier();
        let value = warps[*at].p[reduce.a as usize];
        count += (if reduce.is_inverted { !value } else { value } & lanes).count_ones();
        all += lanes.count_ones();
    }
    for at in here {
        let Some(reduce) = reduction(*at) else { return };
        let (value, width) = match reduce.op {
            Reduction::And => (u32::from(count == all), Width::P),
            Reduction::Or => (u32::from(count != 0), Width::P),
            Reduction::Count => (count, Width::W),
        };
        let register = Register {
            width,
            slot: reduce.d,
        };
        for lane in bits_of(warps[*at].at_barrier()) {
            warps[*at].set(register, lane, u64::from(value));
        }
    }
}
