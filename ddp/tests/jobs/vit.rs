//! Transformers over patches of images, through the program.

use ddp_kernels::{Device, Tensor};

use crate::support::job::{Folder, all_at_once};
use crate::support::metrics_log::{MetricsLog, model_bytes, number};
use crate::using::evaluated;

const MODEL: &str = "--model vit,layers=1,heads=2,width=32,patch=7 --threads 1";
const GLYPHS: &str = "--data glyphs,rows=2048,held-out=256 --batch-size 32";

#[test]
fn it_learns_digits_on_two_ranks_and_is_used_like_any_other_model() {
    let folder = Folder::new("vit");
    let train = format!("{MODEL} {GLYPHS} --pool class --epochs 6 --lr 0.006 --out OUT");
    folder.together(&train).run().assert_well();
    let trained = number(folder.metrics_log().end().unwrap(), "accuracy");
    println!("{trained}");
    // One class in ten would be 0.1.
    assert!(trained > 0.4, "{trained}");
    let data = "--checkpoint OUT --data glyphs,rows=2048,held-out=256";
    let found = evaluated(folder.alone(&format!("eval {data} --json")));
    assert_eq!(number(&found, "accuracy"), trained, "{found}");
    let predict = format!("predict {data} --out rows.csv");
    folder.alone(&predict).run().assert_well();
    let rows = std::fs::read_to_string(folder.path().join("rows.csv")).unwrap();
    assert_eq!(rows.lines().count(), 257, "{rows}");
    let shown = folder.alone("inspect OUT/checkpoints/step-00000384").run();
    shown.assert_well();
    assert!(shown.stdout.contains("blocks.0.attention.mix.qkv.weight"));
    let export = folder.alone("export --format hf --checkpoint OUT there");
    let ended = export.run();
    let text = ended.assert_fails(2);
    assert!(
        text.contains("expected a model of the family gpt, got vit"),
        "{text}"
    );
}

#[test]
fn a_resumed_run_has_the_bits_of_a_whole_one() {
    let run = |out: &Folder, flags: &str| {
        let flags = format!("{flags} --dropout 0.1 --schedule constant --warmup-steps 0");
        let words = format!("{MODEL} {GLYPHS} {flags} --out OUT");
        out.together(&words).run().assert_well();
    };
    let [whole, parts] = ["vit-whole", "vit-parts"].map(Folder::new);
    run(&whole, "--steps 6");
    run(&parts, "--steps 3");
    run(&parts, "--steps 6 --resume auto");
    assert!(model_bytes(&whole.out(), 6) == model_bytes(&parts.out(), 6));
}

/// Images of 8×6 pixels as an array, and as a table with a column for each pixel.
fn with_images() -> Folder {
    let folder = Folder::new("vit-files");
    let pixel = |image: usize, pixel: usize| ((image * 7 + pixel * image) % 16) as f32 / 16.0;
    let x: Vec<f32> = (0..40 * 48).map(|at| pixel(at / 48, at % 48)).collect();
    let y: Vec<i64> = (0..40).map(|image| image % 2).collect();
    let array = |name: &str, shape: &[usize]| {
        let tensor = Tensor::from_slice(&x, shape, Device::Cpu).unwrap();
        tensor.save_npy(folder.path().join(name)).unwrap();
    };
    array("images.npy", &[40, 8, 6]);
    array("flat.npy", &[40, 48]);
    array("turned.npy", &[40, 6, 8]);
    let labels = Tensor::from_slice(&y, &[40], Device::Cpu).unwrap();
    labels.save_npy(folder.path().join("labels.npy")).unwrap();
    folder
}

/// Layer norm once made zeros of such rows, and the run ended well.
#[test]
fn pixels_whose_squares_overflow_end_the_run_with_76() {
    let folder = with_images();
    let pixels: Vec<f32> = (0..40 * 48).map(|at| (at % 7) as f32 * 1e20).collect();
    let images = Tensor::from_slice(&pixels, &[40, 8, 6], Device::Cpu).unwrap();
    images.save_npy(folder.path().join("images.npy")).unwrap();
    let model = "--model vit,layers=1,heads=2,width=8,patch=2 --labels labels.npy";
    let words = format!("{model} --data images.npy --steps 3 --batch-size 8 --out OUT");
    folder.alone(&words).run().assert_fails(76);
}

#[test]
fn images_have_the_shape_of_their_file_or_the_one_that_is_given() {
    let folder = with_images();
    let run = |words: &str| {
        let model = "--model vit,layers=1,heads=2,width=8,patch=2 --labels labels.npy";
        folder
            .alone(&format!("{model} --steps 3 --batch-size 8 {words}"))
            .run()
    };
    run("--data images.npy --out known").assert_well();
    run("--data flat.npy --image 8x6 --out given").assert_well();
    let [known, given] = ["known", "given"].map(|out| folder.path().join(out));
    assert!(model_bytes(&known, 3) == model_bytes(&given, 3));
    assert!(MetricsLog::read(&known).losses() == MetricsLog::read(&given).losses());
    // A model of images takes flat rows with as many pixels.
    let eval = "eval --checkpoint known --data flat.npy --labels labels.npy --json";
    evaluated(folder.alone(eval));
    // Images of another shape are refused, even with as many pixels.
    for out in ["known", "given"] {
        let eval = format!("eval --checkpoint {out} --data turned.npy --labels labels.npy");
        let ended = folder.alone(&eval).run();
        let text = ended.assert_fails(65);
        assert!(text.contains("[6, 8]"), "{text}");
        let checkpoint = format!("{out}/checkpoints/step-00000003");
        let inspected = folder.alone(&format!("inspect {checkpoint}")).run();
        assert!(
            inspected.stdout.contains("images 8x6"),
            "{}",
            inspected.stdout
        );
    }
    let ended = run("--data images.npy --val-data turned.npy --val-labels labels.npy --out OUT");
    let text = ended.assert_fails(65);
    assert!(text.contains("expected rows of shape [8, 6]"), "{text}");
    let cases = [
        (
            "--data flat.npy",
            "--image 48 (from the data): expected the shape of an image",
        ),
        (
            "--data flat.npy --image 8x8",
            "--image 8x8: expected the shape of the 48 numbers",
        ),
        (
            "--data flat.npy --image wide",
            "--image wide: expected lengths with x between them",
        ),
        (
            "--data images.npy --patch 4",
            "--patch 4: expected a divisor of the sides of the images, 8x6",
        ),
        ("--data images.npy --heads 3", "--heads 3"),
        ("--data images.npy --context 3", "requires --model gpt"),
    ];
    all_at_once(cases, |(flags, part)| {
        let ended = run(&format!("{flags} --out OUT"));
        let text = ended.assert_fails(2);
        assert!(text.contains(part), "{flags}: {text}");
    });
}
