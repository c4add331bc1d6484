//! The harness that is fuzzed, too, with the committed corpus and with bytes of a seed.

use super::between::frames_between;

#[test]
fn whoever_is_between_breaks_nothing_else() {
    let corpus = format!("{}/../fuzz/corpus/rails_frames", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(&corpus).unwrap_or_else(|error| panic!("{corpus}: {error}"));
    let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    let inputs: Vec<_> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(inputs.len() >= 8, "{corpus}");
    assert!(frames_between(&[]));
    for (path, input) in paths.iter().zip(&inputs) {
        println!("{}", path.display());
        frames_between(input);
    }
    let seeds = std::env::var("IBVERBS_RAILS_SEEDS").ok().map(|seeds| seeds.parse().unwrap());
    let seeds = seeds.unwrap_or(50_u64);
    let mut connected = 0;
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let length = random.usize(1..120);
        let mut bytes: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
        // Half of them begin as one of the corpus does.
        if random.bool() {
            let input = &inputs[random.usize(..inputs.len())];
            let kept = random.usize(..=input.len().min(length));
            bytes[..kept].copy_from_slice(&input[..kept]);
        }
        println!("seed {seed}");
        connected += u64::from(frames_between(&bytes));
    }
    println!("of {seeds} connections, {connected} were made all the same");
    assert!(connected > seeds / 4, "few inputs get past the greeting: {connected} of {seeds}");
}
