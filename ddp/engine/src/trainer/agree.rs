//! What the ranks compare before they train: first program and settings, then model and data.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

use ddp_comm::{Field, World};
use ddp_data::Data;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Identity;

use crate::checkpoint::unreadable;
use crate::devices::{name_of_real, versions};
use crate::error::Result;
use crate::faults;
use crate::setting::INIT_FROM;
use crate::step::{Stage, Step};

/// Help for ranks of different programs, and of different settings.
const SAME_PROGRAM: &str = "start every rank with the same build of the program";
const SAME_SETTINGS: &str = "start every rank with the same settings";

const FILE: &str = "/proc/self/exe";

/// Compares program and settings, before anything that depends on them. Ranks with different ones
/// would wait for each other in different places.
pub(super) fn compare_programs(settings: &str, world: &World) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let fields = vec![
        Field::must_match("the program's version", version, SAME_PROGRAM),
        Field::must_match("the configuration", settings, SAME_SETTINGS),
    ];
    compare(fields, world)?;
    let (name, bytes) = ("the program's bytes", program_bytes(world)?);
    compare(vec![Field::must_match(name, bytes, SAME_PROGRAM)], world)
}

/// Ends all ranks if a field that must match differs.
pub(super) fn compare(mut fields: Vec<Field>, world: &World) -> Result<()> {
    faults::disagree(&mut fields);
    Ok(world.handshake(&fields)?)
}

/// The hash of this program's file, unless all ranks run the very same file.
fn program_bytes(world: &World) -> Result<String> {
    let identity = fs::metadata(FILE).ok().map(|about| Identity::of(&about));
    let place = format!("{} {identity:?}", world.host());
    let places = world.all_gather_bytes(place.as_bytes())?;
    if places.iter().all(|place| *place == places[0]) {
        return Ok("one file".into());
    }
    program_blake3()
}

/// The BLAKE3 of this program's file, which is read once a process.
pub fn program_blake3() -> Result<String> {
    static KNOWN: OnceLock<String> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(known.clone());
    }
    let hash = hash_program()?;
    Ok(KNOWN.get_or_init(|| hash).clone())
}

fn hash_program() -> Result<String> {
    let (mut hash, mut piece) = (blake3::Hasher::new(), vec![0; 1 << 17]);
    let mut file = File::open(FILE).map_err(unreadable(Path::new(FILE)))?;
    loop {
        heartbeat::beat(Work::Starts);
        match file.read(&mut piece).map_err(unreadable(Path::new(FILE)))? {
            0 => return Ok(hash.finalize().to_hex().to_string()),
            count => hash.update(&piece[..count]),
        };
    }
}

/// The fields of the handshake. A field that must match ends all ranks if it differs.
pub(super) fn fields(
    data: &Data,
    step: &Step,
    has_values: bool,
    base: &Option<String>,
) -> Result<Vec<Field>> {
    let (program, flags) = (SAME_PROGRAM, SAME_SETTINGS);
    let same_values = format!(
        "start every rank with the same build of ddp-train, and the same {INIT_FROM}: compare the files on the hosts"
    );
    let same_data = "give every rank the same data: compare the files on the hosts";
    let bits = "matmuls may differ in their last bits between these ranks";
    let device = step.stages()[0].device();
    let of_stages = |text: &dyn Fn(&Stage) -> Result<String>| -> Result<String> {
        step.stages().iter().map(text).collect()
    };
    let shapes = of_stages(&|stage| Ok(stage.shapes()))?;
    let values = |stage: &Stage| {
        if has_values {
            return Ok(format!("{:016x}", stage.model().params.values_hash()?));
        }
        Ok("given later".into())
    };
    let values = format!("{} {base:?}", of_stages(&values)?);
    let buckets = of_stages(&|stage| Ok(stage.reducer().plan_text()))?;
    let name = |stage: &Stage| name_of_real(stage.device()).unwrap_or("none");
    let gpus: Vec<&str> = step.stages().iter().map(name).collect();
    let cuda = versions(device)
        .into_iter()
        .filter(|_| device.is_accelerator());
    let cuda: Vec<String> = cuda
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    Ok(vec![
        Field::must_match("the parameters' names and shapes", shapes, program),
        Field::must_match("the model's initial weights", values, same_values),
        Field::must_match("the plan of buckets", buckets, flags),
        Field::must_match("the training data", data.train.fingerprint()?, same_data),
        Field::must_match("the held-out data", data.held_out.fingerprint()?, same_data),
        Field::warn("the model of GPU", gpus.join(", "), bits),
        Field::warn("the versions of CUDA's parts", cuda.join(", "), bits),
    ])
}

/// Ends the run if ranks have different models after step `number`. They add the same gradients, so
/// every bit should be equal.
pub(super) fn compare_replicas(step: &mut Step, world: &World, number: u64) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    step.gather()?;
    let mut hashes = String::new();
    for params in step.params() {
        for (name, hash) in params.value_hashes()? {
            hashes += &format!("{name} with the hash {hash:016x}\n");
        }
    }
    let name = format!("the model after step {number}");
    let help = "the memory or GPU of one rank, or a link between ranks, has changed bits, and nothing \
                was saved: run again without that rank's machine, and test it (nvidia-smi -q -d \
                ECC, dcgmi diag)";
    Ok(world.handshake(&[Field::must_match(name, hashes, help)])?)
}

#[cfg(test)]
mod tests {
    use ddp_comm::World;
    use ddp_kernels::Device;
    use ddp_nn::models::ModelSpec;
    use ddp_nn::models::mlp::MlpSpec;

    use super::*;
    use crate::config::Config;
    use crate::trainer::build;

    /// The fields of a run, by name.
    fn fields_of(data: &str, change: impl FnOnce(&mut Config)) -> Vec<(String, String)> {
        let mut options = Config {
            data: data.parse().unwrap(),
            ..Config::default()
        };
        change(&mut options);
        let world = World::single().unwrap();
        let data = build::open(&options, None, &world, None).unwrap();
        let step = build::step(&options, &world, &data, &[Device::Cpu], None).unwrap();
        let fields = fields(&data, &step, true, &None).unwrap();
        let fields = fields.into_iter().map(|field| (field.name, field.value));
        fields.collect()
    }

    fn small() -> ModelSpec {
        ModelSpec::from(MlpSpec {
            hidden: vec![9],
            ..MlpSpec::default()
        })
    }

    #[test]
    fn each_field_changes_with_what_it_stands_for() {
        const DATA: &str = "glyphs,rows=64,held-out=16";
        const OTHER: &str = "glyphs,rows=64,held-out=16,seed=1";
        let same = fields_of(DATA, |_| ());
        assert_eq!(fields_of(DATA, |options| options.keep = 7), same);
        let changed = [
            (
                fields_of(DATA, |options| options.model = small()),
                &[
                    "the parameters' names and shapes",
                    "the model's initial weights",
                ][..],
            ),
            (
                fields_of(DATA, |options| options.seed = 1),
                &["the model's initial weights"],
            ),
            (
                fields_of(DATA, |options| options.bucket_mb = Some(0.01)),
                &["the plan of buckets"],
            ),
            (
                fields_of(OTHER, |_| ()),
                &["the training data", "the held-out data"],
            ),
        ];
        for (fields, names) in changed {
            for name in names {
                let value = |fields: &[(String, String)]| {
                    fields.iter().find(|field| field.0 == *name).cloned()
                };
                assert!(
                    value(&same).is_some() && value(&fields) != value(&same),
                    "{name}"
                );
            }
        }
    }
}
