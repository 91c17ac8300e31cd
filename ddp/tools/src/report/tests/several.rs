//! Several runs in one report.

use super::*;

fn run(folders: &[&Path], out: Option<&Path>) -> Result<()> {
    let folders: Vec<_> = folders.iter().map(|folder| folder.to_path_buf()).collect();
    crate::report::report(&folders, out, None, &mut |_| Ok(()))
}

#[test]
fn several_runs_are_drawn_over_one_another_with_the_settings_that_differ() {
    let scratch = Scratch::new();
    let evil = "a<script>alert(1)</script>";
    let [one, two] = ["one", evil].map(|name| scratch.path().join(name.replace('/', "∕")));
    for (folder, lr) in [(&one, 0.5), (&two, 0.25)] {
        fs::create_dir(folder).unwrap();
        let mut start = start();
        start["config"]["lr"] = json!(lr);
        let lines = [start, step(1), step(2), end("done", 0)];
        write(folder, &lines.map(|line| format!("{line}\n")).concat());
    }
    let path = scratch.path().join("page.html");
    run(&[&one, &two], Some(&path)).unwrap();
    let page = fs::read_to_string(&path).unwrap();
    assert_in_order(
        &without_breaks(&page),
        &[
            "<h1>2 runs</h1>",
            "Loss, training, one<",
            "Loss, training, a&lt;script&gt;",
            "<h2 id=\"results-title\">",
            ">done<",
            ">lr<",
            "0.5",
            "0.25",
            "\"name\":\"one\"",
            "\"name\":\"a\\u003cscript>",
        ],
    );
    assert!(!page.contains("batch-size"), "settings that are equal");
    assert_eq!(page.matches("<script").count(), 2, "{page}");
    let error = run(&[&one, &two], None).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("`out`"));
    let error = run(&[&one, scratch.path()], Some(&path)).unwrap_err();
    assert_eq!(error.exit_code(), 74, "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), page, "the page stays");
}

/// Losses with and without weights of classes were drawn on one axis.
#[test]
fn losses_of_other_scales_have_charts_of_their_own() {
    let scratch = Scratch::new();
    let weights = [json!("none"), json!("balanced"), json!("balanced")];
    let names = ["plain", "one", "two"];
    let folders = names.map(|name| scratch.path().join(name));
    for (folder, weights) in folders.iter().zip(weights) {
        fs::create_dir(folder).unwrap();
        let mut start = start();
        if weights != "none" {
            start["config"]["class-weights"] = weights;
        }
        let eval = json!({"event": "eval", "step": 2, "loss": 0.25, "accuracy": 0.5});
        let lines = [start, step(1), step(2), eval, end("done", 0)];
        write(folder, &lines.map(|line| format!("{line}\n")).concat());
    }
    let path = scratch.path().join("page.html");
    let folders: Vec<&Path> = folders.iter().map(|folder| &**folder).collect();
    run(&folders, Some(&path)).unwrap();
    let page = without_breaks(&fs::read_to_string(&path).unwrap());
    let parts = [
        "Loss, held out, class weights , label smoothing , plain<",
        "Loss, held out, class weights balanced, label smoothing , one<",
        "Loss, held out, class weights balanced, label smoothing , two<",
        "Accuracy, held out, plain<",
        "Accuracy, held out, one<",
        "Loss, training, class weights , label smoothing , plain<",
        "Loss, training, class weights balanced, label smoothing , one<",
    ];
    assert_in_order(&page, &parts);
    assert_eq!(page.matches("\"title\":\"Accuracy\"").count(), 1);
    // How far a loss with weights is from one without says nothing.
    assert!(!page.contains("Loss: distance"), "{page}");
    run(&folders[1..], Some(&path)).unwrap();
    assert!(
        fs::read_to_string(&path)
            .unwrap()
            .contains("Loss: distance")
    );
}
