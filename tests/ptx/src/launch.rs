//! Launches: the blocks of a grid one after the other, the warps of a block in turns between
//! barriers.

use crate::decode::{Owned, Program};
use crate::finding::{Detail, Fault, Finding, Kind};
use crate::memory::{Footprint, Global, GlobalMemory, Shadows};
use crate::moment::{Moment, Other, Who, is_of_block, who_of};
use crate::op::{Reduction, Register, Width};
use crate::order::Order;
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
    /// The order of blocks, warps and atomics.
    pub seed: u64,
    /// How many accesses to global memory are compared with those of other threads.
    pub compared_max: u64,
    /// None: `ex2.approx` and other approximate functions are rounded once, as if they were exact.
    /// Else they err within the bounds of the ISA, by this seed.
    pub errors: Option<u64>,
}

/// What a launch did.
#[derive(Debug)]
pub struct Outcome {
    /// How much it executed, or the first mistake, at which it stopped.
    pub result: Result<Counts, Finding>,
    /// What it touched, up to there.
    pub touched: Footprint,
    /// The first read of global memory that nothing wrote, after which it went on.
    pub unwritten: Option<Finding>,
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
    fn source(&self, at: u32) -> Option<String> {
        let (file, line) = self.program.code.get(at as usize)?.source;
        let (_, name) = self.files.iter().find(|(number, _)| *number == file)?;
        Some(format!("{name}:{line}"))
    }

    fn line(&self, at: u32) -> u32 {
        let coded = self.program.code.get(at as usize);
        coded.map_or(0, |coded| coded.line)
    }

    fn finding(&self, site: &Site, thread: u32, at: u32, fault: Fault, order: &Order) -> Finding {
        let mut message = fault.message;
        let mut access = None;
        if let Some(detail) = fault.detail {
            access = detail.bytes.map(|bytes| Box::new((bytes, detail.does)));
            if let Some(other) = detail.other {
                message.push_str(&self.beside(site, &other, order));
            }
        }
        Finding {
            kind: fault.kind,
            kernel: self.program.name.clone(),
            line: self.line(at),
            source: self.source(at),
            block: site.at,
            thread: thread_at(site, thread),
            message,
            access,
        }
    }

    /// The other side of a race.
    fn beside(&self, site: &Site, other: &Other, order: &Order) -> String {
        let block = place_of(order.block_of(other.stamp), site.grid);
        let who = match who_of(other.stamp) {
            Who::Thread(thread) => {
                let thread = triple(thread_at(site, thread));
                format!("thread {thread} of block {}", triple(block))
            }
            Who::Warp(warp) => format!("several threads of warp {warp} of block {}", triple(block)),
            Who::Block => format!("several threads of block {}", triple(block)),
            Who::Blocks => "threads of several blocks".to_owned(),
        };
        let place = match self.source(other.at) {
            Some(source) => format!(" at {source}"),
            None => format!(" in line {} of its PTX", self.line(other.at)),
        };
        let missing = if is_of_block(other.stamp) && block == site.at {
            "no barrier is between them"
        } else {
            "nothing orders the blocks of a launch"
        };
        format!(", {who} {} some of them{place}, and {missing}", other.does)
    }
}

fn triple([x, y, z]: [u32; 3]) -> String {
    format!("({x}, {y}, {z})")
}

/// The index of the thread of this number in its block.
fn thread_at(site: &Site, thread: u32) -> [u32; 3] {
    let [x, y, _] = site.block;
    [thread % x, thread / x % y, thread / x / y]
}

/// The index of the block of this number.
fn place_of(number: u64, grid: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(grid[0]), u64::from(grid[1]));
    [
        (number % x) as u32,
        (number / x % y) as u32,
        (number / x / y) as u32,
    ]
}

/// An order of things that are done one after another.
#[derive(Clone, Copy)]
enum Turns {
    Forward,
    Backward,
    /// The i-th is `i * step + first`: step and the number of all have no common divisor.
    Scattered {
        step: u64,
        first: u64,
    },
}

impl Turns {
    fn of(count: u64, random: &mut Random) -> Turns {
        match random.below(3) {
            0 => Turns::Forward,
            1 => Turns::Backward,
            _ => {
                let divides = |mut a: u64, mut b: u64| {
                    while b != 0 {
                        (a, b) = (b, a % b);
                    }
                    a
                };
                let mut step = random.below(count) | 1;
                while divides(step, count) != 1 {
                    step += 1;
                }
                let first = random.below(count);
                Turns::Scattered { step, first }
            }
        }
    }

    fn at(self, index: u64, count: u64) -> u64 {
        match self {
            Turns::Forward => index,
            Turns::Backward => count - 1 - index,
            Turns::Scattered { step, first } => {
                let place = u128::from(index) * u128::from(step) + u128::from(first);
                (place % u128::from(count)) as u64
            }
        }
    }
}

/// Runs a launch on global memory.
pub(crate) fn run(
    teller: &Teller<'_>,
    launch: &Launch,
    memory: &dyn GlobalMemory,
    shadows: &mut Shadows,
) -> Outcome {
    let program = teller.program;
    let cell_bytes = program.global_cell_bytes;
    let mut global = Global::new(memory, shadows, cell_bytes, launch.compared_max);
    let mut site = Site {
        grid: launch.grid,
        block: launch.block,
        at: [0; 3],
        dynamic_shared_bytes: launch.dynamic_shared_bytes,
        shared_bytes: program.shared_bytes() as u32 + launch.dynamic_shared_bytes,
    };
    let mut last = global.first_moment();
    let result = match fitting(teller, launch) {
        Err(message) => {
            let fault = Fault::new(Kind::Stopped, 0, message);
            site.block = site.block.map(|size| size.max(1));
            Err(teller.finding(&site, 0, 0, fault, &global.order))
        }
        Ok(parameters) => blocks(
            teller,
            launch,
            &parameters,
            &mut site,
            &mut global,
            &mut last,
        ),
    };
    let mut later = |moment: Moment, kind, message, bytes, does| {
        let block = global.order.block_at(moment.block);
        site.at = place_of(block, launch.grid);
        let mut fault = Fault::new(kind, moment.thread % 32, message);
        fault.detail = Some(Box::new(Detail {
            bytes: Some(bytes),
            does,
            other: None,
        }));
        teller.finding(&site, moment.thread, moment.at, fault, &global.order)
    };
    let unwritten = global.unwritten.clone().map(|(moment, bytes, does)| {
        let (count, start) = (bytes.end - bytes.start, bytes.start);
        let message = format!("{does} {count} bytes at {start:#x}, which nothing wrote");
        later(moment, Kind::NeverWritten, message, bytes, does)
    });
    let stale = global.stale().map(|(moment, bytes)| {
        let message = format!(
            "bytes from {:#x} to {:#x} are written, and read through the read-only path",
            bytes.start, bytes.end
        );
        later(moment, Kind::ReadOnly, message, bytes, "used")
    });
    Outcome {
        result: result.and_then(|counts| stale.map_or(Ok(counts), Err)),
        touched: global.end(last),
        unwritten,
    }
}

/// The parameters of a launch that fits the kernel.
fn fitting(teller: &Teller<'_>, launch: &Launch) -> Result<Vec<u8>, String> {
    let program = teller.program;
    let product = |sizes: [u32; 3]| sizes.iter().map(|size| u64::from(*size)).product::<u64>();
    let (threads, blocks) = (product(launch.block), product(launch.grid));
    if blocks == 0 || threads == 0 || threads > 1024 {
        return Err(format!("a launch of {blocks} blocks of {threads} threads"));
    }
    if let Some(most) = program
        .threads_max
        .filter(|most| threads > u64::from(*most))
    {
        return Err(format!(
            "blocks of {threads} threads, and .maxntid allows {most}"
        ));
    }
    parameters(program, &launch.arguments).ok_or_else(|| {
        let given: Vec<usize> = launch.arguments.iter().map(Vec::len).collect();
        let needed: Vec<u64> = program.parameters.iter().map(|(_, bytes)| *bytes).collect();
        format!("arguments of {given:?} bytes, and the kernel's parameters have {needed:?}")
    })
}

/// Runs the blocks of a launch; `last` becomes its last moment.
fn blocks(
    teller: &Teller<'_>,
    launch: &Launch,
    parameters: &[u8],
    site: &mut Site,
    global: &mut Global<'_>,
    last: &mut u32,
) -> Result<Counts, Finding> {
    let program = teller.program;
    let threads = site.block.iter().product::<u32>();
    let blocks = site
        .grid
        .iter()
        .map(|size| u64::from(*size))
        .product::<u64>();
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
    let mut random = Random(launch.seed);
    let turns = Turns::of(blocks, &mut random);
    let of_warps = Turns::of(u64::from(threads), &mut random);
    let mut ground = Ground {
        program,
        shared: &mut shared,
        barriers: global.first_moment(),
        global,
        parameters,
        warpgroups: Vec::new(),
        is_downward: match of_warps {
            Turns::Forward => false,
            Turns::Backward => true,
            Turns::Scattered { first, .. } => first % 2 == 1,
        },
        errors: launch.errors,
        counts: [0; 2],
        left: STEPS_MAX,
    };
    for index in 0..blocks {
        let number = turns.at(index, blocks);
        site.at = place_of(number, site.grid);
        ground.shared.reset();
        ground.barriers += 1;
        ground.global.order.begin_block(ground.barriers, number);
        ground.warpgroups = (0..threads / 128).map(|_| Warpgroup::default()).collect();
        for (at, warp) in warps.iter_mut().enumerate() {
            warp.start(program, site, at as u32 * 32);
        }
        let done = block(&mut warps, &mut ground, of_warps, &mut random);
        *last = ground.barriers;
        done.map_err(|(thread, at, fault)| {
            teller.finding(site, thread, at, fault, &ground.global.order)
        })?;
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
    turns: Turns,
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
        match turns {
            Turns::Forward => {}
            Turns::Backward => runs.reverse(),
            // From some warp on, another one each time.
            Turns::Scattered { .. } => {
                let first = random.below(runs.len() as u64) as usize;
                runs.rotate_left(first);
            }
        }
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
                        ground.follow_no_more();
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
        // CUDA: all threads of a block come to the same __syncthreads().
        let is_elsewhere = |at: &&usize| waits[**at].is_some_and(|other| other.at != first.at);
        if first.threads.is_none()
            && let Some(at) = here.iter().find(is_elsewhere)
            && let Some(other) = waits[*at]
        {
            let message = format!(
                "barrier {id} has threads that wait at another instruction, {} of the program, here {}",
                other.at, first.at
            );
            let fault = Fault::new(Kind::Barrier, 0, message);
            return Err((warps[*at].first_thread, other.at, fault));
        }
        arrived[id as usize] = 0;
        reduce(warps, &here, waits);
        if is_whole {
            ground.barriers += 1;
            ground.global.order.end_barrier();
        } else {
            ground.follow_no_more();
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
