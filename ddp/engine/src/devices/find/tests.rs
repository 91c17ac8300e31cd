//! Claims about where ranks train. `comm/src/launch/gpus/tests.rs` tests which rank gets which GPU.

use ddp_comm::gpus::{VisibleGpus, assign};

use super::*;
use crate::config::{GraphChoice, Resident};

/// Ranks on one host, each of which sees as many GPUs of the same ones, without troubles.
fn facts(sees: &[usize], per_rank: usize, share: bool) -> GpuFacts {
    let sight = |&count: &usize| VisibleGpus {
        host: "node7".into(),
        uuids: (0..count).map(|gpu| format!("GPU-{gpu:08}")).collect(),
        why_none: (count == 0).then(|| "no driver is installed".into()),
    };
    let gpus = assign(sees.iter().map(sight).collect(), per_rank, share);
    GpuFacts {
        per_rank,
        gpus,
        troubles: vec![None; sees.len()],
    }
}

fn troubled(sees: &[usize], troubles: &[&str]) -> GpuFacts {
    let trouble = |text: &&str| Some(text.to_string()).filter(|text| !text.is_empty());
    GpuFacts {
        troubles: troubles.iter().map(trouble).collect(),
        ..facts(sees, 1, false)
    }
}

const ON_GPUS: DeviceDecision = (true, None);
const ON_CPU: DeviceDecision = (false, None);

#[track_caller]
fn refusal<T>(outcome: Result<T>) -> String {
    let error = outcome.err().expect("it is refused");
    assert_eq!(error.exit_code(), 2, "{error}");
    assert!(matches!(error, Error::Usage(_) | Error::Setting { .. }));
    error.to_string()
}

#[track_caller]
fn warning(choice: DeviceChoice, facts: &GpuFacts) -> String {
    let (on_gpus, warning) = decide(choice, facts).unwrap();
    assert_eq!(on_gpus, choice != DeviceChoice::Auto);
    warning.expect("something is said")
}

#[test]
fn ranks_train_on_gpus_where_each_has_its_own() {
    for (sees, per_rank) in [
        (&[1][..], 1),
        (&[4], 1),
        (&[4, 4, 4, 4], 1),
        (&[4, 4], 2),
        (&[2], 2),
    ] {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda] {
            assert_eq!(
                decide(choice, &facts(sees, per_rank, false)).unwrap(),
                ON_GPUS,
                "{sees:?}"
            );
        }
    }
}

#[test]
fn auto_is_the_cpu_without_a_warning_if_there_is_no_gpu() {
    assert_eq!(
        decide(DeviceChoice::Auto, &facts(&[0], 1, false)).unwrap(),
        ON_CPU
    );
    assert_eq!(
        decide(DeviceChoice::Auto, &facts(&[0, 0, 0], 1, false)).unwrap(),
        ON_CPU
    );
    assert_eq!(
        decide(DeviceChoice::Auto, &facts(&[0, 0], 1, true)).unwrap(),
        ON_CPU
    );
}

#[test]
fn auto_warns_why_no_gpu_can_be_used_where_there_should_be_some() {
    let broken = GpuFacts {
        troubles: vec![Some("the driver is too old.".into()); 2],
        ..facts(&[0, 0], 1, false)
    };
    assert_eq!(
        warning(DeviceChoice::Auto, &broken),
        "training on the CPU because no GPU can be used: on every rank: the driver is too old; \
         help: `device` cpu says that this is meant"
    );
}

#[test]
fn auto_warns_why_it_leaves_gpus_unused() {
    let said = warning(DeviceChoice::Auto, &facts(&[2; 4], 1, false));
    assert!(
        said.contains(
            "ranks 0, 1, 2 and 3 need 4 GPUs and see 2 between them:\n  rank 0 on node7 "
        ),
        "{said}"
    );
    assert!(
        said.contains("\nStart 2 ranks (-n 2), or train without GPUs with `device` cpu, or"),
        "{said}"
    );
    let said = warning(DeviceChoice::Auto, &facts(&[2, 0], 1, false));
    assert!(
        said.contains("rank 1 needs 1 GPU and sees none")
            && said.contains("no driver is installed"),
        "{said}"
    );
    let said = warning(
        DeviceChoice::Auto,
        &troubled(&[1], &["libnvrtc is missing."]),
    );
    assert_eq!(
        said,
        "training on the CPU although there are GPUs: libnvrtc is missing; help: `device` cpu says that this is meant"
    );
    let said = warning(
        DeviceChoice::Auto,
        &troubled(&[3; 3], &["", "NCCL is not found", ""]),
    );
    assert!(
        said.contains("on rank 1 (node7): NCCL is not found; help: `device` cpu says"),
        "{said}"
    );
}

#[test]
fn a_device_that_cannot_be_had_is_refused_with_the_reason() {
    let cuda = |facts: GpuFacts| refusal(decide(DeviceChoice::Cuda, &facts));
    assert_eq!(
        cuda(facts(&[0], 1, false)),
        "`device` cuda: expected a device that can be used here, but no driver is installed; help: give `device` cpu"
    );
    let text = cuda(facts(&[2; 4], 1, false));
    let expected = "`device` cuda: expected GPUs that all 4 ranks can use, but ranks 0, 1, 2 and 3 need 4 GPUs and";
    assert!(
        text.starts_with(expected) && text.ends_with("`share-gpus`, which is for tests"),
        "{text}"
    );
    assert!(
        text.contains(
            "  rank 3 on node7  gets none    sees the same as rank 0\nStart 2 ranks (-n 2), "
        ),
        "{text}"
    );
    let text = cuda(facts(&[1], 2, false));
    assert!(
        text.contains("rank 0 needs 2 GPUs and sees 1:\n") && text.contains("`devices-per-rank` 2"),
        "{text}"
    );
    assert!(
        !text.contains("`share-gpus`"),
        "a rank does not share with itself: {text}"
    );
    assert_eq!(
        refusal(decide(DeviceChoice::Auto, &facts(&[1], 2, false))),
        text.replace("cuda: exp", "auto: exp")
    );
    let text = cuda(facts(&[0, 0], 1, true));
    assert!(
        text.contains("ranks 0 and 1 need 2 GPUs and see none") && text.contains("`device` cpu"),
        "{text}"
    );
    let text = cuda(troubled(&[1], &["libnvrtc is missing."]));
    assert!(
        text.ends_with("can be used here, but libnvrtc is missing; help: give `device` cpu"),
        "{text}"
    );
}

#[test]
fn ranks_that_cannot_use_their_gpus_are_counted() {
    let cuda =
        |troubles: &[&str]| refusal(decide(DeviceChoice::Cuda, &troubled(&[3; 3], troubles)));
    let text = cuda(&["no NCCL"; 3]);
    assert!(
        text.ends_with("all 3 ranks can use, but on every rank: no NCCL; help: give `device` cpu"),
        "{text}"
    );
    assert!(cuda(&["", "", "no NCCL"]).contains("on rank 2 (node7): no NCCL; "));
    assert!(cuda(&["a", "", "b"]).contains("on rank 0 (node7, and 1 rank more): a; "));
    assert!(cuda(&["a", "b", "b"]).contains("on rank 0 (node7, and 2 ranks more): a; "));
}

#[test]
fn a_named_gpu_serves_one_rank_unless_shared() {
    let named = DeviceChoice::CudaAt(1);
    assert_eq!(decide(named, &facts(&[2], 1, false)).unwrap(), ON_GPUS);
    check_index(named, false, 1).unwrap();
    let text = refusal(check_index(named, false, 2));
    assert!(
        text.starts_with("`device` cuda:1: expected `device` cuda for 2 ranks")
            && text.contains("`share-gpus`")
    );
    check_index(named, true, 2).unwrap();
    check_index(DeviceChoice::Cuda, false, 2).unwrap();
    assert!(warning(named, &facts(&[2, 2], 1, true)).contains("(`share-gpus`): this is for tests"));
    let text = refusal(decide(
        named,
        &troubled(
            &[1],
            &["this machine has 1 CUDA device, cuda:0, and no cuda:1"],
        ),
    ));
    assert!(
        text.starts_with("`device` cuda:1: expected a device")
            && text.contains("and no cuda:1; help: give"),
        "{text}"
    );
}

#[test]
fn sharing_is_said_where_it_happens_alone() {
    assert!(
        warning(DeviceChoice::Cuda, &facts(&[1, 1], 1, true))
            .contains("several ranks have the same GPU")
    );
    assert_eq!(
        decide(DeviceChoice::Cuda, &facts(&[2, 2], 1, true)).unwrap(),
        ON_GPUS
    );
}

#[test]
fn a_missing_or_broken_library_is_reported_with_help() {
    let library = |found: Option<&str>, advice: Option<&str>| CudaLibrary {
        what: "NCCL",
        found: found.map(Into::into),
        version: None,
        advice: advice.map(Into::into),
        candidates: Vec::new(),
    };
    assert_eq!(missing(&library(Some("/lib/libnccl.so.2"), None)), None);
    assert_eq!(
        missing(&library(None, Some("install it"))).unwrap(),
        "NCCL is not found: install it"
    );
    let broken = missing(&library(
        Some("/lib/libnccl.so.2"),
        Some("broken: not an ELF file. Reinstall it"),
    ))
    .unwrap();
    assert_eq!(
        broken,
        "NCCL (/lib/libnccl.so.2) is broken: not an ELF file. Reinstall it"
    );
}

#[test]
fn the_cpu_is_used_only_if_all_ranks_choose_it() {
    let worlds = World::threads(2, None, std::time::Duration::from_secs(60)).unwrap();
    let found = |choices: [DeviceChoice; 2]| -> Vec<Result<Vec<Device>>> {
        std::thread::scope(|scope| {
            let ask = |(world, choice)| scope.spawn(move || find_devices(choice, 1, false, world));
            let ranks: Vec<_> = worlds.iter().zip(choices).map(ask).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    for found in found([DeviceChoice::Cpu; 2]) {
        assert_eq!(found.unwrap(), [Device::Cpu]);
    }
    for found in found([DeviceChoice::Cpu, DeviceChoice::Cuda]) {
        let error = found.unwrap_err();
        let named = "ranks disagree on the configuration: rank 1 has device = cuda, rank 0 has device = cpu";
        assert!(
            error.exit_code() == 78 && error.to_string().starts_with(named),
            "{error}"
        );
    }
}

fn config(change: impl FnOnce(&mut Config)) -> Result<Config> {
    let mut config = Config::default();
    change(&mut config);
    config.check().map(|()| config)
}

/// Flags that the CPU has no use for, and what their refusal begins with.
type Change = (fn(&mut Config), &'static str);
const OF_GPUS: [Change; 3] = [
    (
        |settings| settings.devices_per_rank = 2,
        "`devices-per-rank` 2: expected `device` cuda: ",
    ),
    (
        |settings| settings.data_on_device = Resident::On,
        "`data-on-device` on: expected `device` cuda: ",
    ),
    (
        |settings| settings.graph = GraphChoice::On,
        "`graph` on: expected `device` cuda: ",
    ),
];

#[test]
fn what_is_for_gpus_is_refused_on_the_cpu_alone() {
    for (change, begins) in OF_GPUS {
        // Known from the settings, or only once the device is.
        let text = refusal(config(|settings| {
            change(settings);
            settings.device = DeviceChoice::Cpu;
        }));
        assert!(text.starts_with(begins), "{text}");
        for device in [DeviceChoice::Auto, DeviceChoice::Cuda] {
            let config = config(|settings| {
                change(settings);
                settings.device = device;
            });
            let config = config.unwrap();
            assert_eq!(refusal(check_device(&config, Device::Cpu)), text);
            check_device(&config, Device::Cuda(1)).unwrap();
        }
    }
    for on_cpu in [
        config(|settings| (settings.zero, settings.share_gpus) = (1, true)),
        config(|settings| settings.dtype = Precision::Bf16),
        config(|settings| settings.dtype = Precision::Tf32),
        config(|settings| {
            (settings.graph, settings.data_on_device) = (GraphChoice::Off, Resident::Off)
        }),
        config(|_| ()),
    ] {
        check_device(&on_cpu.unwrap(), Device::Cpu).unwrap();
    }
}

#[test]
fn several_gpus_of_a_rank_are_not_captured_and_not_named() {
    let text = refusal(config(|settings| {
        (settings.devices_per_rank, settings.graph) = (2, GraphChoice::On)
    }));
    assert!(
        text.starts_with("`graph` on: expected `devices-per-rank` 1: "),
        "{text}"
    );
    let at = DeviceChoice::CudaAt(1);
    let text = refusal(config(|settings| {
        (settings.devices_per_rank, settings.device) = (2, at)
    }));
    assert!(
        text.starts_with("`device` cuda:1: expected `device` cuda with `devices-per-rank` 2"),
        "{text}"
    );
    config(|settings| (settings.devices_per_rank, settings.device) = (1, at)).unwrap();
    config(|settings| (settings.devices_per_rank, settings.graph) = (2, GraphChoice::Auto))
        .unwrap();
}

#[test]
fn old_gpus_are_not_used_and_bf16_is_refused_on_those_whose_matmuls_have_none() {
    let gpu = |compute_capability| FoundGpu {
        index: 1,
        name: "Old GPU".to_string(),
        memory_bytes: 1 << 30,
        compute_capability,
        uuid: String::new(),
    };
    for (dtype, capability) in [
        (Precision::Bf16, (8, 0)),
        (Precision::Bf16, (0, 0)),
        (Precision::F32, (7, 5)),
        (Precision::Tf32, (7, 5)),
    ] {
        check_dtype(dtype, &gpu(capability)).unwrap();
    }
    for capability in [(0, 0), (7, 5), (8, 0)] {
        assert_eq!(too_old(&gpu(capability)), None);
    }
    for (major, minor) in [(7, 0), (7, 2), (6, 1)] {
        let said = format!(
            "cuda:1 (Old GPU) has compute capability {major}.{minor}, and 7.5 is needed \
             (beside a newer GPU, set CUDA_VISIBLE_DEVICES to leave it out)"
        );
        assert_eq!(too_old(&gpu((major, minor))), Some(said));
    }
    let why = refusal(check_dtype(Precision::Bf16, &gpu((7, 5))));
    assert!(
        why.contains("bf16 needs compute capability 8.0, and cuda:1, Old GPU, has 7.5"),
        "{why}"
    );
}
