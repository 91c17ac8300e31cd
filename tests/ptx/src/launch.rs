//! Launches: the blocks of a grid one after the other, the warps of a block in turns between
//! barriers.

mod block;
mod teller;
mod turns;

use self::block::block;
use self::teller::place_of;
use self::turns::{Random, Turns};
use crate::decode::{Owned, Program};
use crate::finding::{Detail, Fault, Finding, Kind};
use crate::memory::{Footprint, Global, GlobalMemory, Shadows};
use crate::moment::Moment;
use crate::products::Warpgroup;
use crate::shared::Shared;
use crate::state::{Ground, Site, Warp};

pub(crate) use self::teller::Teller;

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
        launch.compared_max > 0,
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
