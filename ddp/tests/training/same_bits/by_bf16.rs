//! Runs whose matmuls multiply bf16: each order of additions has its bits.

use super::*;

/// Runs by bf16: the order of additions, the hash of the model, the model, and settings.
const BF16: [(Bf16Order, &str, &str, &str); 9] = [
    (
        Bf16Order::Amx,
        "cf358e6c44471e9d",
        "mlp,dropout=0.2",
        "dtype=bf16 hidden=40 grad-clip=0.5 micro-batch=2",
    ),
    (
        Bf16Order::Dpbf16,
        "cf358e6c44471e9d",
        "mlp,dropout=0.2",
        "dtype=bf16 hidden=40 grad-clip=0.5 micro-batch=2",
    ),
    (
        Bf16Order::Amx,
        "ba047e4b9de683d3",
        "gpt,context=8,layers=2,width=16,heads=2,dropout=0.1",
        "dtype=bf16 zero=1",
    ),
    (
        Bf16Order::Dpbf16,
        "4d2c26eb0ee756ff",
        "gpt,context=8,layers=2,width=16,heads=2,dropout=0.1",
        "dtype=bf16 zero=1",
    ),
    (
        Bf16Order::Amx,
        "1aa3a776a3ad8ad6",
        "vit,layers=1,width=16,heads=2,patch=7",
        "dtype=bf16 optimizer=muon",
    ),
    (
        Bf16Order::Dpbf16,
        "76020f6f1b3af746",
        "vit,layers=1,width=16,heads=2,patch=7",
        "dtype=bf16 optimizer=muon",
    ),
    (
        Bf16Order::Amx,
        "5c7533d31c1f90b8",
        "mlp,dropout=0.2",
        "dtype=tf32 hidden=40 grad-clip=0.5 micro-batch=2",
    ),
    (
        Bf16Order::Amx,
        "b53426269d104ae9",
        "gpt,context=8,layers=2,width=16,heads=2,dropout=0.1",
        "dtype=tf32 zero=1",
    ),
    (
        Bf16Order::Dpbf16,
        "fc9fbdca12225905",
        "gpt,context=8,layers=2,width=16,heads=2,dropout=0.1",
        "dtype=tf32 zero=1",
    ),
];

#[test]
fn runs_by_bf16_have_the_bits_of_their_order_on_any_number_of_ranks() {
    let _turn = TURN.lock().unwrap();
    let mut wrong = Vec::new();
    for (order, hash, model, settings) in BF16 {
        let [one, more @ ..] = [1, 3].map(|ranks| {
            let folder = Folder::new();
            let config = config(model, settings, &folder.0);
            on_ranks(ranks, Some(ranks as u64), |world| {
                with_bf16_order(order, || train::train(&config, world))
            });
            computed(&config)
        });
        assert!(
            more.iter().all(|more| *more == one),
            "{model} {settings} in {order:?}"
        );
        if one.model != hash {
            wrong.push(format!("{order:?} {model}: {}, not {hash}", one.model));
        }
    }
    assert!(
        wrong.is_empty(),
        "other models than before:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn a_run_by_bf16_keeps_its_order_where_it_is_resumed() {
    let _turn = TURN.lock().unwrap();
    let fixed = "hidden=40 schedule=constant warmup-steps=1 checkpoint-every=1 keep=9";
    for (order, dtype) in [
        (Bf16Order::Amx, "bf16"),
        (Bf16Order::Dpbf16, "bf16"),
        (Bf16Order::Amx, "tf32"),
    ] {
        let fixed = &format!("{fixed} dtype={dtype}");
        let folders = [(); 2].map(|()| Folder::new());
        let [whole, parts] = folders.each_ref().map(|folder| Config {
            epochs: None,
            resume: "auto".parse().unwrap(),
            ..config("mlp", fixed, &folder.0)
        });
        let begin = |config: &Config, steps: u64, order: Option<Bf16Order>| {
            let config = Config {
                steps: Some(steps),
                ..config.clone()
            };
            on_ranks(2, None, |world| match order {
                Some(order) => with_bf16_order(order, || train::train(&config, world)),
                None => train::train(&config, world),
            });
        };
        begin(&whole, 4, Some(order));
        begin(&parts, 2, Some(order));
        // By the instruction or by f32 arithmetic, whatever this processor has.
        begin(&parts, 4, None);
        assert_eq!(computed(&parts), computed(&whole), "{dtype} in {order:?}");
    }
}

#[test]
fn losses_by_bf16_are_close_to_those_in_f32() {
    let _turn = TURN.lock().unwrap();
    let cases = [
        ("mlp", "hidden=64"),
        // At 0.001 it learns its few rows by heart, and any two orders of additions part by 1%.
        ("gpt,context=16,layers=2,width=32,heads=2", "lr=0.0005"),
        ("vit,layers=2,width=32,heads=2,patch=7", "lr=0.001"),
    ];
    // One of four ways a model: without an instruction for bf16, each takes five seconds.
    let chosen = ddp_testing::cases("losses by bf16", 4 * cases.len(), 3);
    for (number, (model, settings)) in cases.into_iter().enumerate() {
        let losses = |dtype: &str, order: Bf16Order| -> Vec<f64> {
            let settings = format!("{settings} dtype={dtype} warmup-steps=10 eval-every=0");
            let folder = Folder::new();
            let config = Config {
                epochs: None,
                steps: Some(150),
                ..config(model, &settings, &folder.0)
            };
            on_ranks(1, None, |world| {
                with_bf16_order(order, || train::train(&config, world))
            });
            let steps = computed(&config).lines;
            let steps = steps.iter().filter(|line| line.starts_with("step "));
            steps
                .map(|line| line.split(' ').nth(2).unwrap().parse().unwrap())
                .collect()
        };
        let ways = [("bf16", 0.01), ("tf32", 1e-3)];
        let orders = [Bf16Order::Amx, Bf16Order::Dpbf16];
        let ways = ways.map(|way| orders.map(|order| (way, order))).concat();
        let numbered = ways.into_iter().zip(4 * number..);
        let ways = numbered.filter_map(|(way, number)| chosen.contains(&number).then_some(way));
        let wide = losses("f32", Bf16Order::Amx);
        for ((dtype, bound), order) in ways {
            let narrow = losses(dtype, order);
            assert_eq!((narrow.len(), wide.len()), (150, 150));
            // Of each thirty steps the mean: single batches differ more.
            for (narrow, wide) in narrow.chunks(30).zip(wide.chunks(30)) {
                let [narrow, wide] = [narrow, wide].map(|of| of.iter().sum::<f64>() / 30.0);
                let apart = (narrow - wide).abs();
                assert!(
                    apart <= bound * wide.max(0.1),
                    "{model} in {order:?}: {narrow} in {dtype}, {wide} in f32"
                );
            }
        }
    }
}
